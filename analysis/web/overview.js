// The view of plots: ladder, throughput over size, roofline, of one op on one device.
const HIGHLIGHTED = 5; // kernels that have a colour of their own in the plot over size; the others are grey

function plotsView(op, device) {
  const { facts } = report, sections = facts.sections.filter(({ settings }) => settings.length);
  if (!sections.length) return make("div", {}, make("h1", {}, "Plots"), make("p", { class: "lead" }, "No row has a time."));
  let section = sections.find((each) => each.op === op && each.device === device) || sections[0];
  const view = make("div");
  const select = (label, options, chosen, change) => make("label", {}, label, make("select", { "aria-label": label, onchange: (event) => change(event.target.selectedIndex) },
    ...options.map((text, index) => make("option", { selected: index === chosen }, text))));

  function compose() {
    const settings = section.settings, of = section.problem.split("/").slice(0, 2).join("/");
    let setting = settings.find(({ name }) => name === of) || settings[0], regime = "cold";
    const below = make("div");
    const controls = () => make("div", { class: "controls" },
      select("Op and device", sections.map((each) => `${each.op} on ${each.device}`), sections.indexOf(section), (i) => { section = sections[i]; compose(); }),
      select("Dtype and parameters", settings.map(({ name }) => words(...name.split("/"))), settings.indexOf(setting), (i) => { setting = settings[i]; fill(); }));
    const fill = () => {
      const found = rowsOf(section, setting.name);
      below.replaceChildren(...ladderPart(section, setting, found), ...sizePart(section, setting, found), ...rooflinePart(section, setting));
    };
    view.replaceChildren(make("h1", {}, "Plots"), make("p", { class: "lead" }, section.origin), controls(), below);
    fill();
  }
  compose();
  return view;
}

// The newest measured rows of a setting (all, where it is ""), in ladder order.
function rowsOf(section, setting) {
  const { rows, facts } = report, found = [];
  for (let row = 0; row < rows.length; row++) {
    if (!rows.columns.newest.values[row] || !facts.measured.includes(rows.at("status", row))) continue;
    if (rows.at("op", row) !== section.op || rows.at("device", row) !== section.device) continue;
    if (setting && `${rows.at("dtype", row)}/${rows.at("params", row)}` !== setting) continue;
    found.push(row);
  }
  return found;
}

function ladderPart(section, setting, found) {
  const { rows } = report, shapes = [...new Set(found.map((row) => rows.at("shape", row)))];
  const work = (shape) => { const row = found.find((each) => rows.at("shape", each) === shape); return rows.at("flops", row) || rows.at("bytes", row); };
  shapes.sort((a, b) => work(a) - work(b));
  const counted = (shape) => found.filter((row) => rows.at("shape", row) === shape).length;
  const most = Math.max(...shapes.map(counted));
  const usual = shapes.findLast((shape) => counted(shape) >= 0.8 * most);
  let chosen = section.problem.startsWith(`${setting.name}/`) && shapes.includes(section.problem.split("/")[2]) ? section.problem.split("/")[2] : usual;
  const box = make("div", { class: "plot" });
  const show = () => {
    const of = found.filter((row) => rows.at("shape", row) === chosen).reverse();
    box.style.height = `${86 + 30 * of.length}px`;
    ladderPlot(box, of, section.metric);
  };
  const control = make("label", {}, "Shape", make("select", { "aria-label": "Shape", onchange: (event) => { chosen = shapes[event.target.selectedIndex]; show(); } },
    ...shapes.map((shape) => make("option", { selected: shape === chosen }, shapeWords(shape)))));
  show();
  return [make("h2", {}, "Ladder"), make("p", { class: "note" }, "Throughput of each kernel on one problem, cold and steady. Dark bars are cold calls, pale ones steady. Green is the fastest kernel, grey PyTorch."), make("div", { class: "controls" }, control), box];
}

function ladderPlot(box, of, metric) {
  const { rows } = report;
  const best = of.reduce((a, b) => (rows.at("cold_rate", b) || 0) > (rows.at("cold_rate", a) || 0) ? b : a, of[0]);
  const color = (row) => row === best ? hue("--good") : rows.at("kernel", row) === "torch" ? hue("--faint") : hue("--accent");
  const names = of.map((row) => safe(rows.at("kernel", row)));
  draw(box, () => ({
    traces: ["steady", "cold"].map((regime) => ({
      type: "bar", orientation: "h", name: regime, y: names, x: of.map((row) => rows.at(`${regime}_rate`, row)),
      text: regime === "cold" ? of.map((row) => ` ${scaled(rows.at("cold_rate", row))}`) : [], textposition: "outside", constraintext: "none", cliponaxis: false, textfont: { size: 11.5 },
      customdata: of.map((row) => `${hoverOf(row)}<br>steady ${duration(rows.at("steady_us", row))}, ${scaled(rows.at("steady_rate", row))} ${safe(metric)}`),
      hovertemplate: "%{customdata}<extra></extra>", marker: { color: of.map(color), opacity: regime === "cold" ? 0.95 : 0.4, line: { width: 0 } },
    })),
    layout: { barmode: "group", bargap: 0.26, bargroupgap: 0.06, xaxis: { title: { text: safe(metric) }, rangemode: "tozero" }, yaxis: { ticks: "", showgrid: false },
      showlegend: false, margin: { t: 20, r: 60 } },
  }));
}

function sizePart(section, setting, found) {
  const { rows } = report;
  const axes = Object.keys(found.length ? sizesOf(rows.at("shape", found[0])) : {});
  const lines = new Map(); // problems of growing size, by what grows and what is fixed
  const add = (row, axis, label, fixed) => {
    const key = `${label} | ${fixed}`;
    if (!lines.has(key)) lines.set(key, { axis, label, fixed, of: [] });
    lines.get(key).of.push(row);
  };
  for (const row of found) {
    const sizes = sizesOf(rows.at("shape", row)), entries = Object.entries(sizes);
    for (const { label, axes: group } of setting.together)
      add(row, group[0], label, entries.filter(([name]) => !group.includes(name)).map(([name, size]) => `${name}=${size}`).join(", "));
    const square = axes.length > 1 && Object.values(sizes).every((size) => size === sizes[axes[0]]);
    if (square && setting.together.length > 1) add(row, axes[0], axes.join(" = "), "");
  }
  const sizesIn = (of, axis) => new Set(of.map((row) => sizesOf(rows.at("shape", row))[axis])).size;
  const options = [...lines.values()].filter(({ of, axis }) => sizesIn(of, axis) > 1);
  if (!options.length) return [];
  const first = setting.series && options.findIndex(({ label, fixed }) => label === setting.series.label && fixed.replaceAll(" ", "") === setting.series.fixed.replaceAll(" ", ""));
  let option = options[first > 0 ? first : 0], measure = 0, logarithmic = true;
  const measures = [["cold_rate", `cold, ${section.metric}`], ["steady_rate", `steady, ${section.metric}`], ["cold_speedup", "% of baseline, cold"], ["steady_speedup", "% of baseline, steady"], ["cold_us", "time, cold, µs"]];
  const box = plotBox(460);
  const show = () => sizePlot(box, option, ...measures[measure], logarithmic);
  const control = (label, texts, chosen, change) => make("label", {}, label, make("select", { "aria-label": label, onchange: (event) => { change(event.target.selectedIndex); show(); } },
    ...texts.map((text, index) => make("option", { selected: index === chosen }, text))));
  const log = make("input", { type: "checkbox", checked: true, onchange: () => { logarithmic = log.checked; show(); } });
  show();
  return [make("h2", {}, "Over size"), make("p", { class: "note" }, `The ${HIGHLIGHTED} kernels that are fastest somewhere most often, and PyTorch, are coloured; hover names any other.`),
    make("div", { class: "controls" }, control("Over", options.map(({ label, fixed }) => fixed ? `${label} (${fixed})` : label), options.indexOf(option), (i) => { option = options[i]; }),
      control("Figure", measures.map(([, label]) => label), 0, (i) => { measure = i; }), make("label", {}, log, "log axis")), box];
}

// The points of a line and, between its ends, an empty point at each size that was not measured; it interrupts the line.
function withGaps(points, sizes, size) {
  const measured = new Set(points.map(size)), first = Math.min(...measured), last = Math.max(...measured);
  const missing = sizes.filter((at) => at > first && at < last && !measured.has(at));
  return [...points.map((row) => ({ at: size(row), row })), ...missing.map((at) => ({ at, row: null }))].sort((a, b) => a.at - b.at);
}

function sizePlot(box, { axis, label, of }, figure, title, logarithmic) {
  const { rows } = report, kernels = [...new Set(of.map((row) => rows.at("kernel", row)))];
  const value = (row) => {
    const ratio = figure.endsWith("speedup"), own = rows.at("kernel", row) === rows.at("baseline", row);
    const found = ratio && own ? 1 : rows.at(figure, row);
    return found == null ? null : ratio ? 100 * found : found;
  };
  const size = (row) => sizesOf(rows.at("shape", row))[axis];
  const sizes = [...new Set(of.map(size))].sort((a, b) => a - b);
  const wins = new Map(kernels.map((kernel) => [kernel, 0]));
  const better = figure.endsWith("_us") ? (a, b) => a - b : (a, b) => b - a;
  for (const each of new Set(of.map(size))) {
    const order = of.filter((row) => size(row) === each && value(row) != null).sort((a, b) => better(value(a), value(b)));
    order.slice(0, 3).forEach((row, place) => wins.set(rows.at("kernel", row), wins.get(rows.at("kernel", row)) + [4, 2, 1][place]));
  }
  const leading = kernels.filter((kernel) => kernel !== "torch").sort((a, b) => wins.get(b) - wins.get(a)).slice(0, HIGHLIGHTED);
  const palette = ["#668ffa", "#c28621", "#b02cc0", "#0a8050", "#d8231a"];
  draw(box, () => ({
    traces: [...kernels.filter((kernel) => !leading.includes(kernel) && kernel !== "torch"), ...[...leading].reverse(), ...kernels.filter((kernel) => kernel === "torch")].map((kernel) => {
      const points = of.filter((row) => rows.at("kernel", row) === kernel && value(row) != null).sort((a, b) => size(a) - size(b));
      const line = withGaps(points, sizes, size);
      const place = leading.indexOf(kernel), torch = kernel === "torch", plain = place < 0 && !torch;
      const color = torch ? hue("--ink") : plain ? hue("--faint") : palette[place];
      return {
        type: "scatter", mode: "lines+markers", name: safe(kernel), x: line.map(({ at }) => at), y: line.map(({ row }) => row == null ? null : value(row)), text: line.map(({ row }) => row == null ? "" : hoverOf(row)), hovertemplate: "%{text}<extra></extra>",
        opacity: plain ? 0.38 : 1, line: { color, width: plain ? 1 : 2, dash: torch ? "dash" : "solid" }, marker: { color, size: plain ? 4 : 7 }, showlegend: !plain,
      };
    }),
    layout: { xaxis: { type: "log", title: { text: safe(label) }, tickmode: "array", tickvals: sizes, ticktext: sizes.map(String) }, yaxis: { type: logarithmic ? "log" : "linear", rangemode: logarithmic ? "normal" : "tozero", title: { text: safe(title) } }, legend: { traceorder: "reversed" } },
  }));
}

function rooflinePart(section, setting) {
  const { rows } = report;
  let all = false, chosen = setting;
  if (!rowsOf(section, setting.name).some((row) => rows.at("flops", row) && rows.at("cold_tflops", row))) return [];
  const box = plotBox(560);
  const show = () => rooflinePlot(box, rowsOf(section, all ? "" : chosen.name), all ? section.settings : [chosen]);
  const check = make("input", { type: "checkbox", onchange: () => { all = check.checked; show(); } });
  show();
  return [make("h2", {}, "Roofline"), make("p", { class: "note" }, "Every kernel and problem, cold, under the rates that were measured on this device. Hollow: bytes as the profiler counted them. Click a name to hide it, twice to show it alone."),
    make("div", { class: "controls" }, make("label", {}, check, "all dtypes and parameters")), box];
}

function rooflinePlot(box, found, settings) {
  const { rows } = report;
  const points = found.filter((row) => rows.at("flops", row) > 0 && rows.at("bytes", row) > 0 && rows.at("cold_tflops", row) > 0);
  const x = (row) => rows.at("flops", row) / rows.at("bytes", row), y = (row) => rows.at("cold_tflops", row);
  const seen = (row) => rows.at("flops", row) / rows.at("dram_bytes", row);
  const best = (field) => settings.reduce((sum, each) => { for (const [name, rate] of Object.entries(each[field])) sum[name] = Math.max(sum[name] || 0, rate); return sum; }, {});
  const flat = best("tflops"), slanted = best("gbps");
  const type = points.length > 4000 ? "scattergl" : "scatter";
  const kernels = [...new Set(points.map((row) => rows.at("kernel", row)))];
  const least = Math.min(...points.map(x)), most = Math.max(...points.map(x)), top = Math.max(...Object.values(flat), ...points.map(y));
  const left = least / 1.6, right = Math.max(most * 1.6, 2 * top * 1e3 / Math.max(1, slanted.copy || slanted.read || 1));
  draw(box, () => {
    const traces = [];
    for (const kernel of kernels) {
      const of = points.filter((row) => rows.at("kernel", row) === kernel), [color, symbol] = looksOf(kernel);
      traces.push({ type, mode: "markers", name: safe(kernel), legendgroup: kernel, x: of.map(x), y: of.map(y), text: of.map(hoverOf), hovertemplate: "%{text}<br>%{x:.3~s} FLOP/byte, %{y:.4~r} TFLOP/s<extra></extra>", marker: { color, symbol, size: 8, opacity: 0.85 } });
      const counted = of.filter((row) => rows.at("dram_bytes", row) > 0);
      if (counted.length) traces.push({ type, mode: "markers", name: safe(kernel), legendgroup: kernel, showlegend: false, x: counted.map(seen), y: counted.map(y), text: counted.map(hoverOf), hovertemplate: "%{text}<br>%{x:.3~s} FLOP per counted byte<extra></extra>", marker: { color, symbol: `${symbol}-open`, size: 8, opacity: 0.7 } });
    }
    const line = (xs, ys, dash) => ({ type: "scatter", mode: "lines", x: xs, y: ys, hoverinfo: "skip", showlegend: false, line: { color: hue("--soft"), width: 1.3, dash } });
    const notes = [];
    const note = (at, height, text, more) => notes.push({ x: Math.log10(at), y: Math.log10(height), text, showarrow: false, font: { size: 11.5, color: hue("--soft") }, ...more });
    for (const [kind, rate] of Object.entries(slanted)) {
      const ridge = Math.min(right, top * 1e3 / rate);
      traces.push(line([left, ridge], [rate * left / 1e3, rate * ridge / 1e3], kind === "copy" ? "solid" : "dot"));
    }
    const upper = Math.max(...Object.values(slanted)), middle = Math.sqrt(left * Math.min(right, top * 1e3 / upper));
    const rates = Object.entries(slanted).map(([kind, rate]) => `${kind} ${rate < 1e3 ? `${scaled(rate)} GB/s` : `${(rate / 1e3).toFixed(2)} TB/s`}${kind === "read" ? " (dotted)" : ""}`);
    if (rates.length) note(middle, upper * middle / 1e3, rates.join("<br>"), { xanchor: "right", yanchor: "bottom", xshift: -6, align: "right" });
    for (const [kind, rate] of Object.entries(flat)) {
      const ridge = rate * 1e3 / (slanted.copy || slanted.read || 1);
      traces.push(line([ridge, right], [rate, rate], "solid"), line([left, ridge], [rate, rate], "dot"));
      note(left, rate, `${safe(kind)} ${scaled(rate)} TFLOP/s`, { xanchor: "left", yanchor: rate === Math.max(...Object.values(flat)) ? "bottom" : "top", xshift: 4 });
    }
    const ticks = (low, high) => [...Array(24).keys()].flatMap((power) => (high < 30 * low ? [1, 2, 5] : [1]).map((digit) => digit * 10 ** (power - 12)));
    const axis = (low, high) => ({ type: "log", tickmode: "array", tickvals: ticks(low, high), range: [Math.log10(low), Math.log10(high)] });
    return { traces, layout: {
      xaxis: { ...axis(left, right), title: { text: "arithmetic intensity, FLOP per byte of device memory" } },
      yaxis: { ...axis(Math.min(...points.map(y)) / 1.8, 1.8 * top), title: { text: "TFLOP/s" } }, annotations: notes } };
  });
}
