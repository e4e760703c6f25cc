// Views: the leaderboard, all rows, the list of kernels, failures.
let report = null; // what readTables found

// Marks after a kernel's name that warn of its times; every view shows them.
const marks = (table, row) => (table.at("status", row) === "unconverged" ? " †" : "") + (table.at("flags", row) ? " ‡" : "");
const MARKS = "† Less precise than asked for, or a judged time that does not fit those inside. ‡ The machine was busy, or something else is to be known of the row: see its flags.";

const kindOf = (verdict) => ({ faster: "faster", slower: "slower", tie: "even" })[verdict] || "";

// The columns of grids, by the names of the table's columns.
function rowColumns(table) {
  const at = (name) => (row) => table.at(name, row);
  const text = (key, label = key, more = {}) => ({ key, label, write: (row) => table.at(key, row) || "", ...more });
  const number = (key, label, write = scaled, more = {}) => ({ key, label, number: true, write: (row) => write(table.at(key, row)), ...more });
  const ratio = (regime) => ({
    key: `${regime}_speedup`, label: `% of baseline, ${regime}`, number: true,
    write: (row) => {
      if (table.at("kernel", row) === table.at("baseline", row)) return "100.0 %";
      const [value, low, high] = ["", "_low", "_high"].map((end) => table.at(`${regime}_speedup${end}`, row)).map((v) => v == null ? null : 100 * v);
      const tie = table.at(`${regime}_verdict`, row) === "tie" ? " tie" : "";
      return value == null ? table.at(`${regime}_verdict`, row) || none : share(value, low, high) + tie;
    },
    look: (row) => kindOf(table.at(`${regime}_verdict`, row)),
  });
  const rate = (regime) => ({
    key: `${regime}_rate`, label: `Throughput, ${regime}`, number: true,
    write: (row) => table.at(`${regime}_rate`, row) == null ? none : `${scaled(table.at(`${regime}_rate`, row))} ${table.at("metric", row)}`,
  });
  const docs = report.facts.docs;
  const all = [
    text("op", "Op"),
    text("kernel", "Kernel", { write: (row) => table.at("kernel", row) + marks(table, row), look: () => "strong", link: (row) => kernelLink(table.at("op", row), table.at("kernel", row)) }),
    text("device", "Device"), text("dtype", "Dtype"), text("params", "Parameters", { write: (row) => valuesOf(table.at("params", row)) }),
    { key: "shape", label: "Shape", write: (row) => shapeWords(table.at("shape", row)) },
    text("status", "Status", { look: (row) => report.facts.measured.includes(table.at("status", row)) ? "" : "slower" }),
    number("cold_us", "Cold", duration), rate("cold"), ratio("cold"),
    number("steady_us", "Steady", duration), rate("steady"), ratio("steady"),
    number("cold_percent_of_peak", "% of peak", percent),
    number("error_over_bound", "Error / bound", (v) => v == null ? none : v === 0 ? "0" : v.toPrecision(3)),
    number("registers", "Registers", whole), number("shared_bytes", "Shared B", whole), number("local_bytes", "Stack B", whole),
    number("workspace_bytes", "Workspace B", whole), number("launches", "Launches", whole), number("cold_rounds", "Rounds", whole),
    number("sm_mhz", "SM MHz", whole), number("power_w", "Power W", whole), number("build_s", "Build s"),
    number("flops", "FLOPs"), number("bytes", "Bytes"), text("baseline", "Baseline"), text("backend", "Backend"),
    text("throttle", "Throttle"), text("commit", "Commit", { write: (row) => (at("commit")(row) || "").slice(0, 13) }),
    text("run", "Run"), text("steady_run", "Run, steady"), { key: "finished", label: "Finished", write: (row) => day(at("finished")(row)) },
    text("timing", "Timing"), text("guarantee", "Guarantee"), text("node", "Node"), text("torch", "PyTorch"), text("driver", "Driver"),
    text("message", "Message", { widest: 90 }), text("flags", "Flags", { widest: 60 }),
  ];
  for (const column of all) column.title = `${column.key}: ${docs[column.key] || EXTRA[column.key] || "from the case's key"}`;
  return all;
}

const EXTRA = { steady_run: "the launch that the steady figures are of" };
const FIRST = ["op", "kernel", "status", "shape", "cold_speedup", "dtype", "params", "steady_speedup", "device", "cold_us", "cold_rate", "steady_rate", "cold_percent_of_peak", "error_over_bound", "registers", "commit", "finished"];

const openRow = (table) => (row) => { location.hash = kernelLink(table.at("op", row), table.at("kernel", row)); };

// A choice of columns for a grid that has `chosen` of `all`.
function columnChooser(grid, all, chosen) {
  const boxes = all.map((column) => make("label", { title: column.title },
    make("input", { type: "checkbox", checked: chosen.includes(column.key), value: column.key, onchange: change }), " ", column.label));
  const box = make("details", { class: "columns" }, make("summary", {}, "Columns"), make("div", {}, ...boxes));
  box.addEventListener("toggle", () => { // to the side where there is room
    const near = box.getBoundingClientRect().left < 460;
    box.lastChild.style.left = near ? "0" : "auto";
    box.lastChild.style.right = near ? "auto" : "0";
  });
  function change() {
    const on = [...box.querySelectorAll("input:checked")].map((input) => input.value);
    grid.layout(all.filter((column) => on.includes(column.key)));
    grid.arrange(grid.sort, grid.descending);
  }
  return box;
}

function leaderboard() {
  const { leaders, rows, facts } = report;
  const counted = rows.columns.newest.values.reduce((sum, value) => sum + value, 0);
  const cards = facts.sections.map(card);
  const parts = [
    make("h1", {}, "Leaderboard"),
    make("p", { class: "lead" }, `${whole(counted)} cases, the newest row of each; ${whole(rows.length)} rows in all. Each figure is the paired ratio of a kernel and PyTorch, timed in the same rounds.`),
    make("div", { class: "cards" }, ...cards),
  ];
  if (!leaders.length) return make("div", {}, ...parts, make("p", { class: "note" }, "No kernel was timed."));
  const at = (name, row) => leaders.at(name, row);
  const shareColumn = (regime, label) => ({
    key: regime, label, number: true,
    title: `PyTorch's time over the kernel's, timed in the same rounds, with its ${regime === "cold" ? "95 % confidence interval" : "range over neighbouring blocks"}`,
    write: (row) => at(regime, row) == null ? at(`${regime}_verdict`, row) || none : share(at(regime, row), at(`${regime}_low`, row), at(`${regime}_high`, row)) + (at(`${regime}_verdict`, row) === "tie" ? " tie" : ""),
    look: (row) => kindOf(at(`${regime}_verdict`, row)),
  });
  const columns = [
    { key: "op", label: "Op", write: (row) => at("op", row) },
    { key: "kernel", label: "Fastest, cold", write: (row) => at("kernel", row) + marks(leaders, row), look: () => "strong", link: (row) => kernelLink(at("op", row), at("kernel", row)) },
    shareColumn("cold", "% of PyTorch, cold"), shareColumn("steady", "% of PyTorch, steady"),
    { key: "dtype", label: "Dtype", write: (row) => at("dtype", row) }, { key: "params", label: "Parameters", write: (row) => valuesOf(at("params", row)) },
    { key: "shape", label: "Shape", write: (row) => shapeWords(at("shape", row)) }, { key: "device", label: "Device", write: (row) => at("device", row) },
    { key: "cold_us", label: "Time", number: true, write: (row) => duration(at("cold_us", row)) },
    { key: "cold_rate", label: "Throughput", number: true, write: (row) => at("cold_rate", row) == null ? none : `${scaled(at("cold_rate", row))} ${at("metric", row)}` },
    { key: "cold_percent_of_peak", label: "% of peak", number: true, write: (row) => percent(at("cold_percent_of_peak", row)) },
    { key: "ties", label: "Cannot be told from", write: (row) => at("ties", row) || "" },
  ];
  const varying = columns.filter(({ key }) => !["op", "device"].includes(key) || leaders.columns[key].texts.length > 1);
  const grid = new Grid(leaders, varying, { open: openRow(leaders), label: "Fastest kernel of each problem" });
  parts.push(
    make("h2", {}, "Fastest kernel of each problem"),
    make("p", { class: "note" }, `Cold: one call at a time, caches flushed; of a judged kernel (Guarantee), calls in the judge's blocks. Steady: calls back to back until the clock settles. A tie cannot be told from PyTorch; the last column names kernels that cannot be told from the fastest. Where the interval of a ratio is too wide, only its verdict is shown. ${MARKS}`),
    filtered(grid, { facets: ["op", "device", "dtype", "params", "kernel"] }));
  return make("div", {}, ...parts);
}

// What is said of an op on a device: its representative problem's fastest kernel.
function card(section) {
  const { leaders } = report;
  const [dtype, params, shape] = (section.problem + "//").split("/");
  let row = -1;
  for (let each = 0; each < leaders.length && section.problem; each++) {
    const same = [["op", section.op], ["device", section.device], ["dtype", dtype], ["params", params], ["shape", shape]];
    if (same.every(([name, value]) => leaders.at(name, each) === value)) row = each;
  }
  const links = make("div", { class: "more" },
    make("a", { href: `#/plots/${encodeURIComponent(section.op)}/${encodeURIComponent(section.device)}` }, "Plots"),
    make("a", { href: `#/rows/${encodeURIComponent(`op=${section.op} device:"${section.device}"`)}` }, "Rows"));
  const head = make("h3", {}, `${section.op} on ${section.device}`);
  if (row < 0) return make("article", { class: "card" }, head, make("div", { class: "where" }, section.origin), links);
  const line = (label, regime) => {
    const verdict = leaders.at(`${regime}_verdict`, row), value = leaders.at(regime, row);
    const badge = ["faster", "slower", "tie"].includes(verdict) ? make("span", { class: `badge ${verdict}` }, verdict) : null;
    if (value == null) return badge ? [make("dt", {}, label), make("dd", {}, badge)] : [];
    const text = share(value, leaders.at(`${regime}_low`, row), leaders.at(`${regime}_high`, row)).split(" (");
    return [make("dt", {}, label), make("dd", {}, make("span", { class: "big" }, text[0]), text[1] ? make("span", { class: "soft" }, ` (${text[1]} `) : " ", badge)];
  };
  const kernel = leaders.at("kernel", row), flags = leaders.at("flags", row), status = leaders.at("status", row), ties = leaders.at("ties", row);
  const doubts = [...(status === "ok" ? [] : [status]), ...(flags ? ["flagged"] : [])].map((text) => make("span", { class: "badge bad", title: flags || text }, text));
  return make("article", { class: "card" }, head,
    make("div", { class: "who" }, make("a", { href: kernelLink(section.op, kernel) }, kernel), ...doubts),
    make("div", { class: "where" }, words(shapeWords(shape), dtype, params)),
    make("dl", {}, ...kernel === "torch" ? [make("dt", {}, "Others"), make("dd", { class: "where" }, ties ? `${ties} cannot be told from it` : "none is faster")] : [...line("Of PyTorch, cold", "cold"), ...line("steady", "steady")],
      make("dt", {}, "Cold call"), make("dd", {}, `${duration(leaders.at("cold_us", row))}, ${scaled(leaders.at("cold_rate", row))} ${leaders.at("metric", row)}`)),
    links);
}

function allRows(query = "") {
  const { rows } = report, known = rowColumns(rows);
  const first = FIRST.filter((key) => key !== "device" || rows.columns.device.texts.length > 1);
  const all = [...FIRST.map((key) => known.find((column) => column.key === key)), ...known.filter(({ key }) => !FIRST.includes(key))];
  const grid = new Grid(rows, all.filter(({ key }) => first.includes(key)), { open: openRow(rows), label: "All rows", height: "calc(100vh - 250px)" });
  const newest = rows.columns.newest.values;
  return make("div", {}, make("h1", {}, "All rows"),
    make("p", { class: "lead" }, "Times of the newest rows of a problem are on one clock: its baseline's, the median over all of them, divided by the paired ratio. Older rows stand as they were measured."),
    filtered(grid, {
      facets: ["op", "device", "dtype", "kernel", "status"], query,
      checks: [{ label: "newest only", on: true, test: (row) => newest[row] }],
      chooser: columnChooser(grid, all, first),
    }));
}

// Of each kernel: how many cases, the best share, the largest error.
function kernelTable() {
  const { rows, facts } = report, found = new Map();
  const measured = rows.columns.status.texts.map((status) => facts.measured.includes(status));
  for (let row = 0; row < rows.length; row++) {
    if (!rows.columns.newest.values[row]) continue;
    const key = rows.columns.op.values[row] * 65536 + rows.columns.kernel.values[row];
    const of = found.get(key) || { row, cases: 0, timed: 0, best: NaN, worst: NaN, error: NaN, registers: NaN };
    found.set(key, of);
    of.cases += 1;
    const value = (name) => rows.columns[name].values[row];
    if (measured[rows.columns.status.values[row]]) {
      of.timed += 1;
      const ratio = rows.at("kernel", row) === rows.at("baseline", row) ? 1 : value("cold_speedup");
      of.best = Math.max(ratio, Number.isNaN(of.best) ? -Infinity : of.best);
      of.worst = Math.min(ratio, Number.isNaN(of.worst) ? Infinity : of.worst);
    }
    for (const [to, from] of [["error", "error_over_bound"], ["registers", "registers"]]) {
      if (!Number.isNaN(value(from))) of[to] = Math.max(value(from), Number.isNaN(of[to]) ? -Infinity : of[to]);
    }
  }
  return [...found.values()];
}

function kernels() {
  const { rows } = report, lines = kernelTable();
  const texts = (name) => {
    const distinct = rows.columns[name].texts, code = new Map(distinct.map((text, index) => [text, index]));
    return { name, texts: distinct, values: lines.map(({ row }) => code.get(rows.at(name, row))), at: (line) => rows.at(name, lines[line].row) };
  };
  const numbers = (name) => ({ name, texts: null, values: lines.map((line) => line[name]), at: (line) => Number.isNaN(lines[line][name]) ? null : lines[line][name] });
  const table = new Table({ length: lines.length, columns: {} }, null, 0);
  for (const name of ["op", "kernel", "backend"]) table.columns[name] = texts(name);
  for (const name of ["cases", "timed", "best", "worst", "error", "registers"]) table.columns[name] = numbers(name);
  table.axis = () => null;
  const times = (value) => value == null || !Number.isFinite(value) ? none : percent(100 * value);
  const columns = [
    { key: "op", label: "Op", write: (row) => table.at("op", row) },
    { key: "kernel", label: "Kernel", write: (row) => table.at("kernel", row), look: () => "strong", link: (row) => kernelLink(table.at("op", row), table.at("kernel", row)) },
    { key: "backend", label: "Backend", write: (row) => table.at("backend", row) || "" },
    { key: "cases", label: "Cases", number: true, write: (row) => whole(table.at("cases", row)) },
    { key: "timed", label: "Timed", number: true, write: (row) => whole(table.at("timed", row)) },
    { key: "best", label: "Best % of baseline, cold", number: true, write: (row) => times(table.at("best", row)) },
    { key: "worst", label: "Worst %", number: true, write: (row) => times(table.at("worst", row)) },
    { key: "error", label: "Largest error / bound", number: true, write: (row) => table.at("error", row) == null ? none : table.at("error", row).toPrecision(3) },
    { key: "registers", label: "Registers", number: true, write: (row) => whole(table.at("registers", row)) },
  ];
  const grid = new Grid(table, columns, { open: openRow(table), label: "Kernels" });
  return make("div", {}, make("h1", {}, "Kernels"),
    make("p", { class: "lead" }, "Each opens a page with its source, resources, counters, errors and history."),
    filtered(grid, { facets: ["op", "backend"], hint: "Filter: words, best>1, registers>200" }));
}

function failures() {
  const { rows, facts } = report, all = rowColumns(rows);
  const chosen = ["op", "kernel", "status", "message", "dtype", "params", "shape", "device", "run", "commit", "finished"];
  const columns = chosen.map((key) => all.find((column) => column.key === key));
  const grid = new Grid(rows, columns, { open: openRow(rows), label: "Failures", sort: "finished", descending: true });
  const measured = rows.columns.status.texts.map((status) => facts.measured.includes(status));
  const failed = (row) => !measured[rows.columns.status.values[row]];
  const unsupported = rows.columns.status.texts.indexOf("unsupported");
  const present = rows.columns.status.texts.filter((status) => status && !facts.measured.includes(status));
  return make("div", {}, make("h1", {}, "Failures"),
    make("p", { class: "lead" }, "Cases that have no time, and why."),
    present.length ? make("dl", { class: "facts" }, ...present.map((status) => make("div", {}, make("b", {}, status), `: ${facts.statuses[status] || "unknown"}`))) : null,
    filtered(grid, {
      facets: ["op", "device", "kernel", "status"],
      checks: [{ label: "failures only", on: true, test: failed },
        { label: "without unsupported", on: true, test: (row) => rows.columns.status.values[row] !== unsupported },
        { label: "newest only", on: false, test: (row) => rows.columns.newest.values[row] }],
    }));
}
