"use strict";
// A line chart as SVG that stands by itself: what it needs are its own attributes, so that it can be saved as it is.
//
// spec: {xLabel, xLog, whole (x in whole numbers), yLabel, yLog, yRange or null, write (a y as text), targets, curves}
// curve: {label, look, x, y, low, high, faint}, arrays of equal length; low and high, the band over seeds, may be null

const DASHES = [null, "7 4", "2 4", "9 4 2 4"]; // the next style once the colours are used up
const colour = (look) => page.colours[look % page.colours.length];
const dash = (look) => DASHES[Math.floor(look / page.colours.length) % DASHES.length];

function swatch(look) {
  return shape("svg", { class: "swatch", viewBox: "0 0 28 12", "aria-hidden": "true" }, stroke(look, 0, 6));
}

// A line of a legend, from x on.
function stroke(look, x, y) {
  const ends = { x1: x, x2: x + 28, y1: y, y2: y };
  return shape("line", { ...ends, stroke: colour(look), "stroke-width": 3, "stroke-dasharray": dash(look) });
}

// Lowest and highest, with a little room; `from` is shown too.
function extent(values, log, from = null) {
  const usable = values.filter((v) => finite(v) && (!log || v > 0));
  if (!log && from !== null) usable.push(from);
  const [low, high] = usable.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) return low < high ? [low / (high / low) ** 0.03, high * (high / low) ** 0.03] : [low / 2, high * 2];
  const room = low < high ? (high - low) * 0.04 : Math.abs(low) / 10 || 1;
  return [low === from ? low : low - room, high + room];
}

function scale([low, high], [from, to], log) {
  const part = log ? (v) => Math.log(v / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
  return { low, high, log, at: (v) => from + part(v) * (to - from), takes: (v) => finite(v) && (!log || v > 0) };
}

// The finish: the part of the y-axis with three quarters of the curves' ends, half of all points and the targets that
// were reached. null where that is most of the whole, or curves are short. `up`: 1 if more is better, −1 if less is.
function finish(curves, targets, up) {
  const ascending = (values) => values.filter(finite).map((v) => up * v).sort((a, b) => a - b);
  const all = ascending(curves.flatMap((c) => c.y));
  if (curves.every((c) => c.y.length < 6)) return null;
  const ends = ascending(curves.map((c) => c.y.at(-1)));
  const [worst, best] = [all[0], all.at(-1)];
  const reached = ascending(targets).filter((v) => v <= best);
  const least = Math.min(ends[Math.floor(ends.length / 4)], all[Math.floor(all.length / 2)], ...reached);
  const from = least - 0.3 * (best - least);
  if (best - worst < 2 * (best - from)) return null;
  const to = best + 0.06 * (best - from);
  return up > 0 ? [from, to] : [-to, -from];
}

function drawing(spec, width, height) {
  const left = 58, right = width - (spec.targets.length ? 46 : 14), top = 32, bottom = height - 46;
  const points = (...keys) => spec.curves.flatMap((c) => keys.flatMap((key) => c[key] ?? []));
  const x = scale(extent(points("x"), spec.xLog, spec.whole ? 1 : 0), [left, right], spec.xLog);
  const y = scale(spec.yRange ?? extent(points("y", "low", "high"), spec.yLog), [bottom, top], spec.yLog);
  const line = (ink, x1, x2, y1, y2, more = {}) => shape("line", { stroke: `var(--${ink})`, x1, x2, y1, y2, ...more });
  const text = (words, at, down, anchor, ink = "quiet") =>
    shape("text", { x: at, y: down, "text-anchor": anchor, fill: `var(--${ink})` }, words);
  const ticks = (axis, wanted, least) => (axis.log ? logTicks : linearTicks)(axis.low, axis.high, wanted, least);

  const parts = ticks(y, height / 65).flatMap((v) => [line("line", left, right, y.at(v), y.at(v)),
    text(spec.write(v).replace(".0 %", " %"), left - 8, y.at(v) + 4, "end")]);
  for (const v of ticks(x, width / 95, spec.whole ? 1 : 0)) {
    parts.push(line("line", x.at(v), x.at(v), top, bottom));
    parts.push(text(brief(v), x.at(v), bottom + 18, "middle"));
  }
  parts.push(line("axis", left, right, bottom, bottom));
  parts.push(text(spec.xLabel, (left + right) / 2, height - 8, "middle", "text"));
  parts.push(text(spec.yLabel, 4, 16, "start", "text"));
  const targets = spec.targets.filter((v) => v > y.low && v < y.high);
  for (const v of targets) {
    parts.push(line("axis", left, right, y.at(v), y.at(v), { "stroke-dasharray": "5 4" }));
    parts.push(text(spec.write(v).replace(".0 %", " %"), right + 6, y.at(v) + 4, "start", "text"));
  }
  // What lies beyond the finish is cut off at the frame; rings on its other sides are whole.
  const frame = { x: left - 6, y: top - 6, width: right - left + 12, height: bottom - top + 6 };
  parts.push(shape("clipPath", { id: "frame" }, shape("rect", frame)));
  parts.push(...spec.curves.map((c) => curve(c, x, y, targets)), shape("g", { id: "cross" }));
  const svg = shape("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height,
    "font-family": "system-ui, sans-serif", "font-size": 12, "aria-hidden": "true" }, parts);
  return Object.assign(svg, { across: x, up: y, frame: { left, right, top, bottom } });
}

function curve(c, x, y, targets) {
  const shown = c.x.map((_, i) => i).filter((i) => x.takes(c.x[i]) && y.takes(c.y[i]));
  const at = (i, values) => `${x.at(c.x[i]).toFixed(1)},${y.at(values[i]).toFixed(1)}`;
  const ink = colour(c.look);
  const dot = (i, attributes) => shape("circle", { cx: x.at(c.x[i]), cy: y.at(c.y[i]), ...attributes });
  const inside = c.low ? shown.filter((i) => y.takes(c.low[i])) : [];
  const outline = [...inside.map((i) => at(i, c.high)), ...inside.reverse().map((i) => at(i, c.low))];
  const path = { points: shown.map((i) => at(i, c.y)).join(" "), "stroke-width": c.faint ? 1.2 : 2.2 };
  const pen = { fill: "none", stroke: ink, "stroke-linejoin": "round", "stroke-dasharray": dash(c.look) };
  const hits = targets.map((target) => c.y.findIndex((v) => v >= target)).filter((i) => i >= 0 && shown.includes(i));
  return shape("g", { class: "curve", "data-curve": c.label, "data-group": c.group, "clip-path": "url(#frame)" },
    outline.length ? shape("polygon", { points: outline.join(" "), fill: ink, opacity: 0.13 }) : null,
    shape("polyline", { ...path, ...pen }),
    shown.length < 12 ? shown.map((i) => dot(i, { r: 2.6, fill: ink })) : null,
    hits.map((i) => dot(i, { class: "hit", r: 4.5, fill: "var(--ground)", stroke: ink, "stroke-width": 2 })));
}
