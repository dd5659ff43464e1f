"use strict";
// A chart that tells its values to pointer and keyboard, and saves itself as SVG and CSV.

// The chart of `spec` in `plot`; drawn again when the width changes.
function show(plot, spec) {
  plot.spec = spec;
  plot.places = [...new Set(spec.curves.flatMap((c) => c.x))].filter(finite).sort((a, b) => a - b);
  const ends = spec.curves.map((c) => `${c.label} ${spec.write(c.y.at(-1))}`).join("; ");
  plot.setAttribute("aria-label", `${spec.yLabel} by ${spec.xLabel}; at the end: ${ends || "nothing yet"}`);
  plot.width = plot.clientWidth || 360;
  plot.svg = drawing(spec, plot.width, Math.round(Math.max(300, Math.min(500, plot.width * 0.48))));
  plot.replaceChildren(spec.curves.length ? plot.svg : element("p", { class: "empty" }, "No curve to draw yet."));
  if (!plot.listens) listen(plot);
}

function listen(plot) {
  plot.listens = true;
  new ResizeObserver(() => plot.clientWidth !== plot.width && show(plot, plot.spec)).observe(plot);
  const point = (event) => {
    const at = event.clientX - plot.getBoundingClientRect().left;
    const far = (i) => Math.abs(plot.svg.across.at(plot.places[i]) - at);
    tell(plot, plot.places.reduce((best, _, i) => (far(i) < far(best) ? i : best), 0), event);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point); // a tap
  const leave = () => { plot.querySelector("#cross")?.replaceChildren(); hush(); };
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const last = plot.places.length - 1, here = plot.here ?? -1;
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") leave();
    if (next === undefined) return;
    event.preventDefault();
    tell(plot, Math.max(0, Math.min(last, next)));
  });
}

// All curves at the place with index `here`: each one's last point up to there, unless the curve has ended before.
function tell(plot, here, pointer = null) {
  const { spec, svg, places } = plot, place = places[here];
  if (place === undefined || !svg.across.takes(place)) return;
  plot.here = here;
  const found = spec.curves.filter((c) => c.x.at(-1) >= place && c.x[0] <= place)
    .map((c) => ({ c, i: c.x.findLastIndex((v) => v <= place) })).filter(({ c, i }) => svg.up.takes(c.y[i]));
  found.sort((a, b) => spec.up * (b.c.y[b.i] - a.c.y[a.i]));
  const box = plot.getBoundingClientRect(), { top, bottom } = svg.frame, x = svg.across.at(place);
  const line = shape("line", { x1: x, x2: x, y1: top, y2: bottom, stroke: "var(--axis)" });
  const dots = found.map(({ c, i }) => ({ cx: svg.across.at(c.x[i]), cy: svg.up.at(c.y[i]), fill: colour(c.look) }));
  const inside = dots.filter(({ cy }) => cy >= top && cy <= bottom);
  svg.querySelector("#cross").replaceChildren(line, ...inside.map((dot) => shape("circle", { r: 4, ...dot })));
  const least = (v) => spec.write(v).replace(" %", ""); // the unit stands once
  const band = ({ low, high }, i) => (low ? ` (${least(low[i])} to ${spec.write(high[i])})` : "");
  const rows = found.slice(0, 16).map(({ c, i }) => element("tr", {},
    element("td", {}, swatch(c.look), c.label), element("td", {}, spec.write(c.y[i]), band(c, i))));
  const heading = element("p", {}, `${spec.xName} ${brief(place)}`);
  say([heading, element("table", {}, rows)], pointer?.clientX ?? box.left + x, pointer?.clientY ?? box.top + top);
}

// Heading, then a row for each point: what the folded table shows and the CSV has.
function pointsOf(spec) {
  const point = (c) => (v, i) => [c.label, v, c.y[i], c.low?.[i] ?? "", c.high?.[i] ?? ""];
  const headings = ["run", spec.xLabel, spec.yLabel, "lowest seed", "highest seed"];
  return [headings, ...spec.curves.flatMap((c) => c.x.map(point(c)))];
}

// Quoted; a name that a spreadsheet would take for a formula gets an apostrophe in front.
function asCSV(spec) {
  const quoted = (text) => `"${text.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  const field = (v) => (typeof v === "number" ? String(Number(v.toPrecision(7))) : quoted(v));
  return pointsOf(spec).map((row) => `${row.map(field).join(",")}\r\n`).join("");
}

// On light ground, whatever the page has, with its legend below: a picture for a paper.
function asSVG(spec) {
  const svg = drawing(spec, 900, 460);
  const columns = 3, lines = Math.ceil(spec.curves.length / columns), height = 470 + 20 * lines;
  spec.curves.forEach((c, i) => {
    const [x, y] = [58 + (i % columns) * 280, 476 + 20 * Math.floor(i / columns)];
    svg.append(stroke(c.look, x, y), shape("text", { x: x + 36, y: y + 4, fill: "var(--text)" }, c.label));
  });
  svg.prepend(shape("rect", { width: 900, height, fill: "var(--ground)" }));
  svg.setAttribute("viewBox", `0 0 900 ${height}`);
  svg.setAttribute("height", height);
  svg.querySelector("#cross").remove();
  const probe = document.body.appendChild(element("i"));
  probe.style.colorScheme = "light";
  const text = new XMLSerializer().serializeToString(svg).replace(/var\(--\w+\)/g, (ink) => {
    probe.style.color = ink;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return text;
}
