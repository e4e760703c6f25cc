// Plots, by Plotly, which is decompressed when the first one is wanted.
let plotlyReady = null;
const drawn = []; // what to draw again when the theme changes

function plotly() {
  plotlyReady ||= unpacked("plotly").then((buffer) => {
    const script = make("script");
    script.textContent = new TextDecoder().decode(buffer);
    document.head.append(script);
    return window.Plotly;
  });
  return plotlyReady;
}

const plotBox = (height) => make("div", { class: "plot", style: `height:${height + 18}px` });
const safe = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const hue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const looksOf = (kernel) => report.facts.looks[kernel] || ["#787e87", "circle"];

// `compose` gives traces and layout, again for each theme.
async function draw(box, compose) {
  const Plotly = await plotly();
  const render = () => {
    const { traces, layout } = compose();
    const axis = { gridcolor: hue("--line"), linecolor: hue("--faint"), zeroline: false, ticks: "outside", tickcolor: hue("--line"), exponentformat: "SI", automargin: true };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: hue("--sans"), size: 12.5, color: hue("--soft") },
      margin: { l: 68, r: 20, t: 24, b: 62 }, hovermode: "closest", dragmode: "zoom",
      hoverlabel: { bgcolor: hue("--ground"), bordercolor: hue("--faint"), font: { color: hue("--ink"), family: hue("--sans"), size: 12.5 }, align: "left" },
      legend: { font: { size: 12 }, itemwidth: 30, tracegroupgap: 2 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: hue("--faint"), activecolor: hue("--accent") },
    };
    const merged = { ...base, ...layout, margin: { ...base.margin, ...layout.margin }, legend: { ...base.legend, ...layout.legend }, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
    return Plotly.react(box, traces, merged, { displaylogo: false, responsive: true, displayModeBar: "hover", modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]] });
  };
  const known = drawn.find((each) => each.box === box);
  if (known) known.render = render;
  else drawn.push({ box, render });
  await render();
}

function redraw() {
  for (const each of [...drawn]) {
    if (each.box.isConnected) each.render();
    else drawn.splice(drawn.indexOf(each), 1);
  }
}

const hoverOf = (row) => {
  const { rows } = report;
  const ratio = rows.at("cold_speedup", row);
  return [`<b>${safe(rows.at("kernel", row))}</b>`, safe(words(rows.at("dtype", row), rows.at("params", row), shapeWords(rows.at("shape", row)))),
    `cold ${duration(rows.at("cold_us", row))}, ${scaled(rows.at("cold_rate", row))} ${safe(rows.at("metric", row))}`,
    ratio == null ? "" : `${share(100 * ratio, 100 * rows.at("cold_speedup_low", row), 100 * rows.at("cold_speedup_high", row))} of ${safe(rows.at("baseline", row))}`,
    rows.at("cold_percent_of_peak", row) == null ? "" : `${percent(rows.at("cold_percent_of_peak", row))} of peak`].filter(Boolean).join("<br>");
};

function errorPlot(box, found) {
  const { rows } = report;
  const known = found.filter((row) => rows.at("error_over_bound", row) != null);
  draw(box, () => ({
    traces: [...new Set(known.map((row) => rows.at("dtype", row)))].map((dtype, index) => {
      const of = known.filter((row) => rows.at("dtype", row) === dtype);
      return {
        type: "scatter", mode: "markers", name: safe(dtype), x: of.map((row) => rows.at("flops", row) || rows.at("bytes", row)), y: of.map((row) => Math.max(rows.at("error_over_bound", row), 1e-4)),
        text: of.map((row) => `${safe(words(rows.at("dtype", row), rows.at("params", row), shapeWords(rows.at("shape", row))))}<br>${rows.at("error_over_bound", row).toPrecision(3)} of the bound`),
        hovertemplate: "%{text}<extra></extra>", marker: { size: 8, color: [hue("--accent"), "#c28621", "#0a8050", "#b02cc0"][index % 4], opacity: 0.85 },
      };
    }),
    layout: { xaxis: { type: "log", title: { text: "work of a call (FLOPs; bytes where there are none)" } }, yaxis: { type: known.some((row) => rows.at("error_over_bound", row) > 1.5) ? "log" : "linear", rangemode: "tozero", title: { text: "error / bound" } },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: hue("--bad"), width: 1.2, dash: "dot" } }], showlegend: true },
  }));
}

function historyPlot(box, cases) {
  const { rows } = report, palette = ["#668ffa", "#c28621", "#b02cc0", "#0a8050", "#f245bd", "#d8231a"];
  const varies = (name) => new Set(cases.map(([row]) => rows.at(name, row))).size > 1;
  const several = ["device", "dtype", "params"].filter(varies);
  const differing = (row) => words(shapeWords(rows.at("shape", row)), ...several.map((name) => rows.at(name, row)));
  draw(box, () => ({
    traces: cases.map((of, index) => ({
      type: "scatter", mode: "lines+markers", name: safe(differing(of[0])), x: of.map((row) => rows.at("finished", row)), y: of.map((row) => 100 * rows.at("cold_speedup", row)),
      error_y: { type: "data", symmetric: false, thickness: 1, width: 3, array: of.map((row) => 100 * (rows.at("cold_speedup_high", row) - rows.at("cold_speedup", row))), arrayminus: of.map((row) => 100 * (rows.at("cold_speedup", row) - rows.at("cold_speedup_low", row))) },
      text: of.map((row) => `${hoverOf(row)}<br>commit ${safe((rows.at("commit", row) || none).slice(0, 13))}, ${day(rows.at("finished", row))}`),
      hovertemplate: "%{text}<extra></extra>", line: { width: 1.4, color: palette[index % 6] }, marker: { size: 6, color: palette[index % 6] },
    })),
    layout: { xaxis: { type: "date" }, yaxis: { title: { text: "% of baseline, cold" } }, showlegend: true, legend: { font: { size: 11 } } },
  }));
}
