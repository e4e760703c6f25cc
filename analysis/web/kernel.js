// The page of a kernel.
const WORDS = new Set("alignas auto bool break case class const constexpr continue def double else enum explicit float for from if import in inline int long namespace not operator or return short sizeof static struct switch template typename unsigned using void volatile while with None True False uint32_t uint64_t int64_t int32_t __global__ __device__ __shared__ __restrict__ __launch_bounds__ asm".split(" "));

// Source with comments, strings and keywords told apart; every piece is text.
function highlighted(text, python) {
  const comment = python ? '#[^\\n]*|"""[\\s\\S]*?"""' : "//[^\\n]*|/\\*[\\s\\S]*?\\*/";
  const pattern = new RegExp(`(${comment})|("(?:[^"\\\\\\n]|\\\\.)*")|([A-Za-z_]\\w*)`, "g");
  const lines = [make("span", { class: "line", "data-line": 1 })];
  const put = (piece, kind) => piece.split("\n").forEach((part, index) => {
    if (index) lines.push(make("span", { class: "line", "data-line": lines.length + 1 }));
    if (part) lines[lines.length - 1].append(kind ? make("span", { class: kind }, part) : part);
  });
  let place = 0;
  for (const found of text.matchAll(pattern)) {
    put(text.slice(place, found.index), "");
    put(found[0], found[1] ? "comment" : found[2] ? "string" : WORDS.has(found[0]) ? "word" : "");
    place = found.index + found[0].length;
  }
  put(text.slice(place), "");
  return make("pre", { tabindex: "0", "aria-label": "Source" }, ...lines);
}

function plainTable(head, lines, numbers = []) {
  const cell = (tag, value, index) => make(tag, { class: numbers.includes(index) ? "number" : String(value).length > 40 ? "wide" : null }, value);
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text, index) => cell("th", text, index)))),
    make("tbody", {}, ...lines.map((line) => make("tr", {}, ...line.map((value, index) => cell("td", value, index)))))));
}

function kernelPage(op, kernel) {
  const { rows, facts } = report;
  const about = facts.kernels.find((each) => each.op === op && each.kernel === kernel);
  const mine = [];
  const codes = [rows.columns.op.texts.indexOf(op), rows.columns.kernel.texts.indexOf(kernel)];
  for (let row = 0; row < rows.length; row++) {
    if (rows.columns.op.values[row] === codes[0] && rows.columns.kernel.values[row] === codes[1]) mine.push(row);
  }
  if (!mine.length) return make("div", {}, make("h1", {}, "No such kernel"), make("p", { class: "lead" }, `There is no row of ${op} ${kernel}.`));
  const newest = mine.filter((row) => rows.at("newest", row));
  const timed = newest.filter((row) => facts.measured.includes(rows.at("status", row)));
  const failed = mine.filter((row) => !facts.measured.includes(rows.at("status", row)));
  const page = make("div", {}, make("p", { class: "note" }, make("a", { href: "#/kernels" }, "Kernels"), " / ", op), make("h1", {}, make("code", {}, kernel)),
    make("p", { class: "facts" }, ...[["backend", rows.at("backend", mine[0]) || none], ["cases", whole(newest.length)], ["timed", whole(timed.length)], ["rows", whole(mine.length)],
      ["devices", [...new Set(mine.map((row) => rows.at("device", row)))].join(", ")]].map(([name, value]) => make("span", {}, `${name} `, make("b", {}, value)))));
  const add = (title, note, ...content) => page.append(make("h2", {}, title), note ? make("p", { class: "note" }, note) : "", ...content);

  const all = rowColumns(rows);
  const keys = ["device", "dtype", "params", "shape", "status", "cold_us", "cold_rate", "cold_speedup", "steady_rate", "steady_speedup", "cold_percent_of_peak", "error_over_bound", "commit"];
  const member = new Uint8Array(rows.length);
  for (const row of newest) member[row] = 1;
  const varies = (key) => !["device", "dtype", "params", "status"].includes(key) || new Set(newest.map((row) => rows.at(key, row))).size > 1;
  const grid = new Grid(rows, keys.filter(varies).map((key) => all.find((column) => column.key === key)), { label: "Cases", height: "420px" });
  add("Cases", "The newest row of each; times on one clock.", grid.element);
  grid.filter(member);

  if (timed.length) {
    const error = plotBox(260), history = plotBox(300);
    add("Error against its bound", "Largest |output − reference| over the bound, over all elements and all sets of inputs of a case. Above 1 is wrong.", error);
    errorPlot(error, newest);
    const repeated = repeatedCases(mine);
    if (repeated.length) {
      add("History", "Throughput of cold calls as a share of the baseline's, of the cases that were timed more than once; the bars are 95 % intervals.", history);
      historyPlot(history, repeated);
    }
  }
  if (about && about.resources.length) add("Resources", "What the machine code of each device function takes, by architecture.", resourceTable(about.resources));
  if (about && about.counters.length) counterSection(about.counters, add);
  if (failed.length) {
    const shown = failed.slice(0, 200);
    add("Failures", failed.length > shown.length ? `The first ${shown.length} of ${whole(failed.length)}.` : "", plainTable(["Status", "Problem", "Message", "Run"],
      shown.map((row) => [rows.at("status", row), words(rows.at("dtype", row), rows.at("params", row), shapeWords(rows.at("shape", row))), rows.at("message", row) || "", rows.at("run", row) || ""])));
  }
  if (about && about.source) {
    const { path, text, commit, changed, headers } = about.source;
    const when = commit ? `at commit ${commit.slice(0, 12)}, the newest row's${changed ? ", whose tree had changes" : ""}` : "as in the checkout that made this report";
    add("Source", `${path}, ${when}.${headers.length ? ` It includes ${headers.join(", ")}.` : ""}`, highlighted(text, path.endsWith(".py")));
  }
  return page;
}

function resourceTable(resources) {
  const value = (v) => v == null ? none : whole(v);
  return plainTable(["Arch", "Function", "Registers", "Shared B", "Stack B", "Spills B", "Threads", "Occupancy", "Instructions", "Most of them"],
    resources.map((r) => [r.arch, r.function.length > 160 ? `${r.function.slice(0, 159)}…` : r.function, value(r.registers),
      value((r.shared_bytes || 0) + (r.dynamic_shared_bytes || 0)), value(r.stack_bytes), r.local_store_bytes || r.local_load_bytes ? `${value(r.local_store_bytes)} + ${value(r.local_load_bytes)}` : "0",
      value(r.max_threads), r.occupancy_percent == null ? none : `${Math.round(r.occupancy_percent)} %`, value(r.instructions),
      Object.entries(r.code).slice(0, 6).map(([name, n]) => `${whole(n)} ${name}`).join(", ")]), [2, 3, 4, 5, 6, 7, 8]);
}

function counterSection(counters, add) {
  const value = (v, digits = 1) => v == null ? none : v.toFixed(digits);
  add("Counters", "What the hardware counted in one cold call (Nsight Compute), of the largest cases.",
    plainTable(["Problem", "Device", "DRAM MB", "of least", "DRAM %", "Tensor %", "SM %", "L2 hit %", "SM MHz"],
      counters.map(({ problem, device, bytes, values: v }) => [words(...problem.split("/")), device, value(v.dram_bytes == null ? null : v.dram_bytes / 1e6),
        v.dram_bytes && bytes ? `${value(v.dram_bytes / bytes, 2)}×` : none, value(v.dram_percent), value(v.tensor_percent), value(v.sm_percent), value(v.l2_hit_percent), value(v.sm_mhz, 0)]), [2, 3, 4, 5, 6, 7, 8]));
  const said = counters.filter(({ says }) => says.length);
  if (said.length) add("What the counters say", "", make("ul", { class: "says" }, ...said.map(({ problem, says }) => make("li", {}, make("span", { class: "soft" }, `${words(...problem.split("/"))}: `), says.join(" ")))));
}

// The measured rows of each case on a device that was timed more than once, oldest first.
function repeatedCases(mine) {
  const { rows, facts } = report, cases = new Map();
  for (const row of mine) {
    if (!facts.measured.includes(rows.at("status", row)) || rows.at("cold_speedup", row) == null) continue;
    const name = [rows.at("device", row), rows.at("dtype", row), rows.at("params", row), rows.at("shape", row)].join("/");
    cases.set(name, [...(cases.get(name) || []), row]);
  }
  const found = [...cases.values()].filter((of) => of.length > 1).sort((a, b) => b.length - a.length).slice(0, 24);
  for (const of of found) of.sort((a, b) => rows.at("finished", a) - rows.at("finished", b));
  return found;
}
