// Tables: a filter's language, and a grid that draws only the rows in sight.
const ROW = 30;

function tokens(query) {
  return [...query.matchAll(/(-?)(?:([\w.]+)(:|<=|>=|<|>|=))?(?:"([^"]*)"?|(\S+))/g)].map(
    ([all, minus, name, sign, quoted, bare]) => ({ all, minus: Boolean(minus), name, sign, value: quoted ?? bare }));
}

// Which rows a query lets through: a byte a row. Throws an Error with a sentence.
function matching(table, query) {
  const passed = new Uint8Array(table.length).fill(1);
  for (const token of tokens(query)) {
    const found = token.name && (token.sign !== "=" || table.has(token.name)) ? byColumn(table, token) : anywhere(table, token);
    for (let row = 0; row < passed.length; row++) passed[row] &= found[row] ^ token.minus;
  }
  return passed;
}

function byColumn(table, { name, sign, value }) {
  const column = table.column(name);
  if (!column) throw new Error(`There is no column ${name}.`);
  if (column.texts) return byText(column, value.toLowerCase(), sign === "=");
  const limit = Number(value);
  if (Number.isNaN(limit)) throw new Error(`${name} takes a number.`);
  const { values } = column, found = new Uint8Array(values.length);
  const tests = { "<": (v) => v < limit, ">": (v) => v > limit, "<=": (v) => v <= limit, ">=": (v) => v >= limit };
  const test = tests[sign] || ((v) => v === limit);
  for (let row = 0; row < found.length; row++) found[row] = test(values[row]);
  return found;
}

function byText(column, text, exact) {
  const hits = Uint8Array.from(column.texts, (each) => exact ? each.toLowerCase() === text : each.toLowerCase().includes(text));
  const { values } = column, found = new Uint8Array(values.length);
  if (hits.includes(1)) for (let row = 0; row < found.length; row++) found[row] = hits[values[row]];
  return found;
}

function anywhere(table, { all, minus }) {
  const text = all.slice(minus ? 1 : 0).replaceAll('"', "").toLowerCase();
  const found = new Uint8Array(table.length);
  for (const column of Object.values(table.columns)) {
    if (!column.texts) continue;
    const hits = byText(column, text, false);
    for (let row = 0; row < found.length; row++) found[row] |= hits[row];
  }
  return found;
}

// The rows in the order of a column; those without a value come last.
function ordered(table, name, descending) {
  const order = Uint32Array.from({ length: table.length }, (_, row) => row);
  if (!name) return order;
  const { values, texts } = table.column(name), sign = descending ? -1 : 1;
  const last = texts ? (code) => texts[code] === "" : Number.isNaN;
  return order.sort((a, b) => {
    const x = values[a], y = values[b];
    if (x === y) return a - b;
    if (last(x) || last(y)) return last(x) - last(y) || a - b;
    return x < y ? -sign : sign;
  });
}

class Grid {
  // `columns`: key (of the table, to sort by), label, title, write(row) -> text, look(row) -> class, link(row) -> address.
  constructor(table, columns, { sort = null, descending = false, open = null, label = "", height = "min(70vh, 720px)" } = {}) {
    Object.assign(this, { table, columns, sort, descending, open, active: 0, drawn: "" });
    this.shown = new Uint32Array();
    this.body = make("div", { class: "body", role: "rowgroup" });
    this.head = make("div", { class: "head", role: "row" });
    this.element = make("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": label, style: `height:${height}` }, this.head, this.body);
    this.tallest = height;
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => { this.drawn = ""; this.draw(); }).observe(this.element);
    this.passed = new Uint8Array(table.length).fill(1);
    this.layout(columns);
    this.arrange(sort, descending);
  }

  layout(columns) {
    this.columns = columns;
    const sample = Array.from({ length: Math.min(1500, this.table.length) }, (_, i) => Math.floor(i * this.table.length / Math.min(1500, this.table.length)));
    this.template = columns.map((column) => {
      const texts = sample.map((row) => column.write(row).length);
      const longest = Math.max(column.label.length + 2, ...texts);
      const shown = Math.min(column.widest || 44, longest);
      return `${(shown * (shown < 16 ? 0.64 : 0.58) + 1.7).toFixed(2)}em`;
    }).join(" ") + " minmax(0, 1fr)"; // what is left over is nobody's
    this.head.style.gridTemplateColumns = this.template;
    this.head.replaceChildren(...columns.map((column) => make("div", { role: "columnheader", class: column.number ? "number" : null },
      make("button", { type: "button", title: column.title || null, onclick: () => this.arrange(column.key, this.sort === column.key ? !this.descending : Boolean(column.number)) }, column.label))));
    this.body.replaceChildren();
    this.drawn = "";
  }

  arrange(sort, descending) {
    Object.assign(this, { sort, descending });
    this.order = ordered(this.table, sort, descending);
    this.columns.forEach((column, index) => {
      const state = column.key === sort ? (descending ? "descending" : "ascending") : "none";
      this.head.children[index].setAttribute("aria-sort", state);
    });
    this.filter(this.passed);
  }

  // Show the rows of which `passed` has a 1.
  filter(passed) {
    this.passed = passed;
    this.shown = this.order.filter((row) => passed[row]);
    this.active = 0;
    this.element.setAttribute("aria-rowcount", this.shown.length + 1);
    this.body.style.height = `${Math.max(1, this.shown.length) * ROW}px`;
    this.element.style.height = `min(${this.tallest}, ${36 + Math.max(1, this.shown.length) * ROW + 18}px)`;
    this.element.scrollTop = 0;
    this.drawn = "";
    this.draw();
  }

  draw() {
    const room = (this.element.clientHeight || 700) - 34;
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW) - 4);
    const end = Math.min(this.shown.length, first + Math.ceil(room / ROW) + 8);
    const state = `${first}-${end}-${this.active}`;
    if (state === this.drawn) return;
    this.drawn = state;
    const lines = [];
    for (let place = first; place < end; place++) lines.push(this.line(place));
    if (!this.shown.length) lines.push(make("div", { class: "empty" }, "No row matches."));
    this.body.replaceChildren(...lines);
    this.body.style.minWidth = `${this.head.scrollWidth}px`;
  }

  line(place) {
    const row = this.shown[place];
    const cells = this.columns.map((column) => {
      const text = column.write(row), look = column.look ? column.look(row) : "";
      const names = [column.number ? "number" : "", look].filter(Boolean).join(" ");
      const address = column.link && column.link(row);
      const content = address ? make("a", { href: address, tabindex: "-1" }, text) : text;
      return make("div", { role: "gridcell", class: names || null, title: text.length > 24 ? text : null }, content);
    });
    const line = make("div", { role: "row", class: place === this.active ? "row active" : "row", "aria-rowindex": place + 2, "aria-selected": place === this.active }, ...cells);
    line.style.gridTemplateColumns = this.template;
    line.style.transform = `translateY(${place * ROW}px)`;
    line.dataset.place = place;
    return line;
  }

  move(place) {
    this.active = Math.min(this.shown.length - 1, Math.max(0, place));
    const top = this.active * ROW, room = this.element.clientHeight - 36;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    if (top + ROW > this.element.scrollTop + room) this.element.scrollTop = top + ROW - room;
    this.draw();
  }

  key(event) {
    const page = Math.floor(this.element.clientHeight / ROW) - 2;
    const places = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page, PageUp: this.active - page, Home: 0, End: this.shown.length - 1 };
    if (event.key in places && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.move(places[event.key]);
    } else if (event.key === "Enter" && this.open && this.shown.length && event.target === this.element) {
      event.preventDefault();
      this.open(this.shown[this.active]);
    }
  }

  click(event) {
    const line = event.target.closest(".row");
    if (line && !event.target.closest("a")) this.move(Number(line.dataset.place));
  }
}

// A grid under a filter, facets and, perhaps, a choice of columns.
function filtered(grid, { facets = [], checks = [], chooser = null, query = "", hint = "Filter: words, kernel:v14, cold_us<20, m=1" } = {}) {
  const { table } = grid;
  const search = make("input", { type: "search", placeholder: hint, "aria-label": "Filter", spellcheck: "false", autocomplete: "off", value: query });
  const count = make("span", { class: "count", role: "status" });
  const selects = facets.filter((name) => table.columns[name] && table.columns[name].texts.length > 1).map((name) => {
    const options = table.columns[name].texts.filter(Boolean).map((text) => make("option", { value: text }, text));
    return make("select", { "aria-label": name, "data-name": name, onchange: apply }, make("option", { value: "" }, `Any ${name}`), ...options);
  });
  const boxes = checks.map(({ label, on, test }) => {
    const box = make("input", { type: "checkbox", checked: on, onchange: apply });
    return { box, test, label: make("label", {}, box, label) };
  });
  function apply() {
    try {
      const passed = matching(table, search.value);
      for (const select of selects) {
        const column = table.columns[select.dataset.name], code = column.texts.indexOf(select.value);
        if (select.value) for (let row = 0; row < passed.length; row++) passed[row] &= column.values[row] === code;
      }
      for (const { box, test } of boxes) {
        if (box.checked) for (let row = 0; row < passed.length; row++) passed[row] &= test(row);
      }
      grid.filter(passed);
      count.className = "count";
      count.textContent = `${whole(grid.shown.length)} of ${whole(table.length)}`;
    } catch (error) {
      count.className = "count error";
      count.textContent = error.message;
    }
  }
  search.addEventListener("input", apply);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape" || event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      grid.element.focus();
    }
  });
  apply();
  const controls = make("div", { class: "controls" }, search, ...selects, ...boxes.map(({ label }) => label), chooser, count);
  return make("section", {}, controls, grid.element);
}
