// The address decides what is shown; keys and the theme.
const VIEWS = { "": leaderboard, plots: plotsView, rows: allRows, kernels, kernel: kernelPage, failures };

function decoded(word) {
  try { return decodeURIComponent(word); } catch { return word; } // somebody wrote the address by hand
}

function show() {
  const [name, ...words] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  const view = VIEWS[name] || leaderboard;
  const content = view(...words);
  $("#view").replaceChildren(content);
  const current = name === "kernel" ? "kernels" : name in VIEWS ? name : "";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
  (content.querySelector(".grid") || $("#view")).focus({ preventScroll: true });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("#theme").textContent = theme === "dark" ? "Light" : "Dark";
  redraw();
}

function toggleTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("minfer-theme", theme); } catch { /* not kept */ }
  setTheme(theme);
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("#help").open) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  const places = ["#/", "#/plots", "#/rows", "#/kernels", "#/failures"];
  const search = $("input[type=search]");
  if (event.key === "/" && search) { event.preventDefault(); search.focus(); search.select(); }
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") $("#help").showModal();
  else if (places[Number(event.key) - 1]) location.hash = places[Number(event.key) - 1];
}

async function begin() {
  setTheme(document.documentElement.dataset.theme);
  $("#theme").addEventListener("click", toggleTheme);
  $("#keys").addEventListener("click", () => $("#help").showModal());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  document.addEventListener("keydown", keys);
  report = await readTables();
  const { rows, facts } = report;
  const failed = rows.columns.status.texts.map((status) => status !== "unsupported" && !facts.measured.includes(status));
  const counts = { "#/rows": rows.length, "#/kernels": facts.kernels.length, "#/failures": rows.columns.status.values.reduce((sum, code) => sum + failed[code], 0) };
  for (const [href, n] of Object.entries(counts)) $(`nav a[href="${href}"]`).append(make("span", { class: "count" }, whole(n)));
  addEventListener("hashchange", show);
  show();
  performance.mark("usable");
  document.documentElement.dataset.ready = "yes";
}

begin().catch((error) => {
  $("#view").replaceChildren(make("p", { class: "error" }, `The report cannot be shown: ${error.message}`));
  throw error;
});
