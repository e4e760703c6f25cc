// Data: the page's tables, decompressed, and how figures are written.
const $ = (selector, inside = document) => inside.querySelector(selector);

// Everything that comes from rows goes through here or `textContent`: a name is never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

async function unpacked(id) {
  const holder = document.getElementById(id);
  const response = await fetch("data:application/octet-stream;base64," + holder.textContent);
  holder.remove();
  return new Response(response.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const ARRAYS = { f4: Float32Array, f8: Float64Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

class Column {
  constructor(name, about, buffer, start, length) {
    this.name = name;
    this.texts = about.texts || null;
    this.values = new ARRAYS[about.type](buffer, start + about.offset, length);
  }

  // A text, or a number; null for NaN.
  at(row) {
    const value = this.values[row];
    return this.texts ? this.texts[value] : Number.isNaN(value) ? null : value;
  }
}

class Table {
  constructor(about, buffer, start) {
    this.length = about.length;
    this.columns = {};
    for (const [name, each] of Object.entries(about.columns)) {
      this.columns[name] = new Column(name, each, buffer, start + about.offset, about.length);
    }
    this.axes = new Map();
  }

  has(name) { return name in this.columns || this.axis(name) !== null; }
  column(name) { return this.columns[name] || this.axis(name); }
  at(name, row) { return this.columns[name] ? this.columns[name].at(row) : null; }

  // The sizes of an axis of the shapes, such as m of "m=1,n=2"; null where no shape has it.
  axis(name) {
    if (!this.axes.has(name)) {
      const shapes = this.columns.shape;
      const sizes = shapes.texts.map((text) => sizesOf(text)[name] ?? NaN);
      const known = sizes.some((size) => !Number.isNaN(size));
      const values = known ? Float64Array.from(shapes.values, (code) => sizes[code]) : null;
      this.axes.set(name, known ? { name, texts: null, values, at: (row) => Number.isNaN(values[row]) ? null : values[row] } : null);
    }
    return this.axes.get(name);
  }
}

async function readTables() {
  const buffer = await unpacked("data");
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const tables = {};
  for (const [name, about] of Object.entries(header.tables)) tables[name] = new Table(about, buffer, 4 + length);
  return { ...tables, facts: header.facts };
}

function sizesOf(shape) {
  return Object.fromEntries(shape.split(",").filter(Boolean).map((part) => [part.split("=")[0], Number(part.split("=")[1])]));
}

// m=n=k=4096 where all sides are equal, else m=1, n=2.
function shapeWords(shape) {
  const sizes = Object.entries(sizesOf(shape));
  const equal = sizes.length > 1 && sizes.every(([, size]) => size === sizes[0][1]);
  return equal ? `${sizes.map(([axis]) => axis).join("=")}=${sizes[0][1]}` : shape.replaceAll(",", ", ");
}

// The values of parameters: layout=TN,accumulate=float32 is TN float32.
const valuesOf = (params) => params.split(",").map((part) => part.split("=").pop()).join(" ");

const words = (...parts) => parts.filter(Boolean).map((part) => part.replaceAll(",", ", ")).join(" · ");

// How a figure is written: as `significant` of analysis/tables/markdown.py does.
function significant(value, digits = 4) {
  if (!(value > 0) || !Number.isFinite(value)) return value === 0 ? "0" : String(value);
  const exponent = Number(value.toExponential(digits - 1).split("e")[1]);
  return value.toFixed(Math.min(20, Math.max(0, digits - 1 - exponent)));
}

const none = "—";
const duration = (us) => us == null ? none : us < 999.95 ? `${significant(us)} µs` : us < 999950 ? `${significant(us / 1000)} ms` : `${significant(us / 1e6)} s`;

function scaled(value) {
  if (value == null) return none;
  for (const [power, prefix] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (value >= Math.max(power, 1e5)) return significant(value / power) + prefix;
  }
  return significant(value);
}

const percent = (value) => value == null ? none : `${significant(value, value < 100 ? 3 : 4)} %`;
const whole = (value) => value == null ? none : Math.round(value).toLocaleString("en").replaceAll(",", " ");
const day = (time) => time == null ? none : new Date(time).toISOString().slice(0, 16).replace("T", " ");

// A share with its interval: 104.8 % (104.7–105.2).
function share(value, low, high) {
  if (value == null) return none;
  const decimals = (significant(value, value < 100 ? 3 : 4).split(".")[1] || "").length;
  const ends = low != null && high != null && low !== high ? ` (${low.toFixed(decimals)}–${high.toFixed(decimals)})` : "";
  return `${value.toFixed(decimals)} %${ends}`;
}

const kernelLink = (op, kernel) => `#/kernel/${encodeURIComponent(op)}/${encodeURIComponent(kernel)}`;
