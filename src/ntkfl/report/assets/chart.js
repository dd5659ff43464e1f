"use strict";
// A line chart in SVG. A series is {id, label, look, x, y, low?, high?, faint?}; x and y are arrays of equal length.

const DASHES = [null, "7 4", "2 4", "9 4 2 4"]; // the next style once the ten colours are used up

function linearTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high, wanted) {
  const decades = Math.log10(high / low);
  const leads = decades < 1.2 ? [1, 2, 3, 5, 7] : decades < 3 ? [1, 2, 5] : [1];
  const skip = leads.length > 1 ? 1 : Math.max(1, Math.ceil(decades / wanted));
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    if (p % skip === 0) for (const lead of leads) if (lead * 10 ** p >= low * 0.999 && lead * 10 ** p <= high * 1.001) found.push(lead * 10 ** p);
  }
  return found;
}

class Axis {
  constructor(values, log, from, to, floor = null) {
    const usable = values.filter((v) => finite(v) && (!log || v > 0));
    let [low, high] = usable.length ? usable.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]) : [log ? 1 : 0, 1];
    if (!log && floor !== null) low = Math.min(low, floor);
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const room = log ? (high / low) ** 0.03 : (high - low) * 0.03;
    this.low = log ? low / room : floor !== null && low >= floor ? low : low - room;
    this.high = log ? high * room : high + room;
    Object.assign(this, { log, from, to });
  }
  at(v) {
    const part = this.log ? Math.log(v / this.low) / Math.log(this.high / this.low) : (v - this.low) / (this.high - this.low);
    return this.from + part * (this.to - this.from);
  }
  shows(v) { return finite(v) && (!this.log || v > 0); }
  ticks(wanted) {
    const found = this.log ? logTicks(this.low, this.high, wanted) : linearTicks(this.low, this.high, wanted);
    return found.length > 1 || !this.log ? found : linearTicks(this.low, this.high, wanted).filter((v) => v > 0);
  }
}

function lineChart(figure, spec) {
  figure.spec = spec;
  if (!figure.drawn) {
    figure.drawn = true;
    figure.append(element("figcaption"));
    figure.svg = figure.appendChild(shape("svg", { tabindex: 0, role: "img" }));
    figure.where = { series: 0, point: -1 };
    listen(figure);
    new ResizeObserver(() => { if (figure.clientWidth && figure.clientWidth !== figure.width) draw(figure); }).observe(figure);
  }
  figure.hidden = !spec.series.some((s) => s.x.length);
  draw(figure);
}

// The one value of all points, where they share one: a sentence says it better than a chart.
function constant(spec) {
  const values = new Set(spec.series.flatMap((s) => [...s.y, ...(s.low ?? []), ...(s.high ?? [])]).filter(finite));
  return values.size === 1 ? [...values][0] : null;
}

function draw(figure) {
  const { spec, svg } = figure;
  const same = constant(spec);
  svg.toggleAttribute("hidden", same !== null);
  figure.querySelector("details")?.toggleAttribute("hidden", same !== null);
  if (same !== null) {
    figure.querySelector("figcaption").textContent = `${spec.title}: ${spec.yFormat(same)} at every point`;
    [figure.x, figure.y] = [new Axis([], false, 0, 1), new Axis([], false, 0, 1)];
    return svg.replaceChildren(shape("g", { class: "mark" }));
  }
  const width = (figure.width = figure.clientWidth || 360);
  const height = Math.round(Math.max(230, Math.min(330, width * 0.68)));
  const inset = { left: 58, right: 12, top: 10, bottom: 44 };
  const shown = spec.series.filter((s) => s.x.length);
  const all = (key) => shown.flatMap((s) => s[key] ?? []);
  const x = (figure.x = new Axis(all("x"), spec.xLog, inset.left, width - inset.right, spec.xFloor ?? null));
  const y = (figure.y = new Axis([...all("y"), ...all("low"), ...all("high")], spec.yLog, height - inset.bottom, inset.top));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", `${spec.title}: ${shown.map((s) => `${s.label}, ${s.x.length} points, ${spec.yFormat(s.y.at(-1))} at the end`).join("; ") || "nothing to show"}`);
  figure.querySelector("figcaption").textContent = spec.title;
  const parts = [];
  for (const v of y.ticks(5)) {
    parts.push(shape("line", { class: "grid", x1: inset.left, x2: width - inset.right, y1: y.at(v), y2: y.at(v) }));
    parts.push(shape("text", { x: inset.left - 7, y: y.at(v) + 4, "text-anchor": "end" }, (spec.yTick ?? tick)(v)));
  }
  let end = -Infinity;
  for (const v of x.ticks(width / 75)) {
    const label = tick(v);
    const half = 3.6 * label.length;
    parts.push(shape("line", { class: "grid", x1: x.at(v), x2: x.at(v), y1: inset.top, y2: height - inset.bottom }));
    if (x.at(v) - half < end + 4 || x.at(v) + half > width) continue;
    parts.push(shape("text", { x: x.at(v), y: height - inset.bottom + 16, "text-anchor": "middle" }, label));
    end = x.at(v) + half;
  }
  parts.push(shape("line", { class: "axis", x1: inset.left, x2: width - inset.right, y1: height - inset.bottom, y2: height - inset.bottom }));
  parts.push(shape("text", { class: "title", x: (inset.left + width - inset.right) / 2, y: height - 8, "text-anchor": "middle" }, spec.xLabel));
  for (const v of spec.targets ?? []) {
    if (v >= y.low && v <= y.high) parts.push(shape("line", { class: "target", x1: inset.left, x2: width - inset.right, y1: y.at(v), y2: y.at(v) }));
  }
  for (const s of shown) parts.push(...curve(s, x, y));
  parts.push(shape("g", { class: "mark" }));
  svg.replaceChildren(...parts);
  light(figure, figure.lit);
  mark(figure, false);
  numbers(figure, spec.title, () => chartTable(spec));
}

function curve(s, x, y) {
  const found = [];
  const there = s.x.map((_, i) => i).filter((i) => x.shows(s.x[i]) && y.shows(s.y[i]));
  const at = (i, values) => `${x.at(s.x[i]).toFixed(1)},${y.at(values[i]).toFixed(1)}`;
  const look = `s${s.look % 10}`;
  if (s.low) {
    const inside = there.filter((i) => y.shows(s.low[i]) && y.shows(s.high[i]));
    const outline = [...inside.map((i) => at(i, s.high)), ...inside.reverse().map((i) => at(i, s.low))];
    found.push(shape("polygon", { class: `band ${look}`, "data-series": s.id, fill: "currentColor", points: outline.join(" ") }));
  }
  found.push(shape("polyline", {
    class: `curve ${look}`, "data-series": s.id, "data-points": there.length, stroke: "currentColor",
    "stroke-dasharray": s.dash ?? DASHES[Math.floor(s.look / 10) % DASHES.length], "stroke-width": s.faint ? 1.2 : 2, points: there.map((i) => at(i, s.y)).join(" "),
  }));
  if (there.length < 16) {
    for (const i of there) found.push(shape("circle", { class: `dot ${look}`, "data-series": s.id, cx: x.at(s.x[i]), cy: y.at(s.y[i]), r: 2.6, fill: "currentColor" }));
  }
  return found;
}

// Dim everything but the group whose row is pointed at.
function light(figure, group) {
  figure.lit = group;
  const own = new Set(figure.spec.series.filter((s) => s.group === group).map((s) => s.id));
  for (const part of figure.svg.querySelectorAll("[data-series]")) part.classList.toggle("faded", own.size > 0 && !own.has(part.dataset.series));
}

function mark(figure, speak, at = null) {
  const { spec, svg, where, x, y } = figure;
  const s = spec.series[where.series];
  const group = svg.querySelector(".mark");
  group.replaceChildren();
  if (!s || where.point < 0 || !x.shows(s.x[where.point]) || !y.shows(s.y[where.point])) return;
  const [cx, cy] = [x.at(s.x[where.point]), y.at(s.y[where.point])];
  group.append(shape("circle", { class: `cross s${s.look % 10}`, cx, cy, r: 5, stroke: "currentColor" }));
  if (!speak) return;
  const range = s.low ? ` (${spec.yFormat(s.low[where.point])} to ${spec.yFormat(s.high[where.point])})` : "";
  const box = svg.getBoundingClientRect();
  const text = `${s.label}\n${spec.xName ?? spec.xLabel} ${(spec.xFormat ?? brief)(s.x[where.point])}${s.notes ? `, ${s.notes[where.point]}` : ""}\n${spec.yName} ${spec.yFormat(s.y[where.point])}${range}`;
  say(text, at?.clientX ?? box.left + cx * (box.width / figure.width), at?.clientY ?? box.top + cy * (box.height / svg.viewBox.baseVal.height));
}

function listen(figure) {
  const { svg } = figure;
  const near = (event) => {
    const box = svg.getBoundingClientRect();
    const [px, py] = [(event.clientX - box.left) * (figure.width / box.width), event.clientY - box.top];
    let best = 40 ** 2;
    figure.where = { series: 0, point: -1 };
    figure.spec.series.forEach((s, series) => s.x.forEach((v, point) => {
      if (!figure.x.shows(v) || !figure.y.shows(s.y[point])) return;
      const far = (figure.x.at(v) - px) ** 2 + (figure.y.at(s.y[point]) - py) ** 2;
      if (far < best) [best, figure.where] = [far, { series, point }];
    }));
    mark(figure, true, event);
    if (figure.where.point < 0) hush();
  };
  svg.addEventListener("pointermove", near);
  svg.addEventListener("pointerdown", near); // a tap
  const leave = () => { figure.where = { series: 0, point: -1 }; mark(figure, false); hush(); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const { where, spec } = figure;
    const count = spec.series.length;
    if (event.key === "Escape") return leave();
    if (!count || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "ArrowUp") where.series = (where.series + count - 1) % count;
    if (event.key === "ArrowDown") where.series = (where.series + 1) % count;
    const last = spec.series[where.series].x.length - 1;
    const next = { ArrowLeft: where.point - 1, ArrowRight: where.point + 1, Home: 0, End: last }[event.key] ?? where.point;
    where.point = Math.max(0, Math.min(last, next));
    mark(figure, true);
  });
}

function chartTable(spec) {
  const rows = [["", spec.xLabel, spec.yName]];
  for (const s of spec.series) s.x.forEach((v, i) => rows.push([s.label, brief(v), spec.yFormat(s.y[i])]));
  return rows;
}
