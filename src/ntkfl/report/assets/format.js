"use strict";
// Elements and numbers. All text goes in as text, never as markup: names come from files.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);
const finite = (v) => v !== null && v !== undefined && Number.isFinite(v);
const MIB = 1048576;

function brief(v) {
  if (!finite(v)) return "";
  const size = Math.abs(v);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return v.toExponential(2).replace("e+", "e").replace("e-", "e−");
  if (size >= 1000) return Math.round(v).toLocaleString("en-US");
  return String(Number(v.toPrecision(size >= 100 ? 4 : 3)));
}

const percent = (v, digits = 1) => (finite(v) ? `${(100 * v).toFixed(digits)} %` : "");

function tick(v) {
  const size = Math.abs(v);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) {
    const power = Math.floor(Math.log10(size) + 1e-9);
    const lead = Number((v / 10 ** power).toPrecision(3));
    return `${lead === 1 ? "" : `${lead}·`}10${String(power).replace(/./g, (c) => ({ "-": "⁻" })[c] ?? "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])}`;
  }
  return size >= 1000 ? v.toLocaleString("en-US") : String(Number(v.toPrecision(6)));
}

function sums(values) {
  let total = 0;
  return values.map((v) => (total += v ?? 0));
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// The message beside the pointer, or beside what has the focus.
function say(text, x, y) {
  const tip = byId("tip");
  if (tip.textContent !== text) tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(Math.max(4, y + 14), innerHeight - box.height - 4)}px`;
}

const hush = () => { byId("tip").hidden = true; };

// Numbers under a chart, made when they are asked for.
function numbers(figure, name, rows) {
  let details = figure.querySelector("details");
  if (!details) {
    details = element("details", {}, element("summary", {}, "Numbers"));
    figure.append(details);
    details.addEventListener("toggle", () => details.refresh());
  }
  details.refresh = () => {
    details.querySelector("div")?.remove();
    if (details.open) details.append(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, table(rows())));
  };
  details.refresh();
}

function table([headers, ...body]) {
  const head = element("tr", {}, ...headers.map((h, i) => element("th", { scope: "col", class: i ? "number" : null }, h)));
  const lines = body.map((cells) =>
    element("tr", {}, ...cells.map((c, i) => (i ? element("td", { class: "number" }, c) : element("th", { scope: "row" }, c)))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
}

// A name in so many characters: its beginning and its end, as names of one comparison often differ there.
function shortened(name, most) {
  if (name.length <= most) return name;
  const end = Math.floor(most / 2) - 1;
  return `${name.slice(0, most - 1 - end)}…${end > 0 ? name.slice(-end) : ""}`;
}

// A picture's caption and its SVG, whose parts say what they have in data-say; drawn again by `redraw` when its width changes.
function framed(figure, redraw) {
  figure.redraw = redraw;
  if (figure.drawn) return;
  figure.drawn = true;
  figure.append(element("figcaption"));
  figure.svg = figure.appendChild(shape("svg", { role: "img" }));
  new ResizeObserver(() => { if (figure.clientWidth && figure.clientWidth !== figure.width) figure.redraw(); }).observe(figure);
  sayParts(figure.svg);
}

function sayParts(svg) {
  svg.addEventListener("pointermove", (e) => (e.target.dataset.say ? say(e.target.dataset.say, e.clientX, e.clientY) : hush()));
  svg.addEventListener("pointerleave", hush);
}
