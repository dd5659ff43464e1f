"use strict";
// The runs with what they reached: sorted, shown or hidden; and the legend of those that are shown.

const COLUMNS = ["run", "condition", "accuracy, %", "best, %", "rounds to target", "MiB up + down to target", "MiB up + down in all", "seconds", "files"];
const ACCURACY = 2; // its column
const BEST_FIRST = [ACCURACY, 3]; // columns in which more is better
const WAYS = ["uplink_bytes", "downlink_bytes"];

// The first round at the target, and the bytes sent up and down until then.
function reached(run, target) {
  const i = (run.series.test_accuracy ?? []).findIndex((a) => finite(a) && a >= target);
  return i < 0 ? null : { rounds: run.rounds[i], bytes: WAYS.map((way) => sums(run.series[way] ?? [])[i]) };
}

// [up, down] in bytes of each seed, as means in MiB: "48 + 21 = 69". They add up as they are shown.
function bothWays(sent) {
  const there = sent.filter((ways) => ways?.every(finite));
  if (!there.length) return "—";
  const [up, down] = WAYS.map((_, way) => mean(there.map((ways) => ways[way])) / MIB);
  const digits = [10, 1, 0.05, 0.005, 0].findIndex((least) => up + down >= least);
  const shown = [up, down].map((v) => Number(v.toFixed(digits)));
  return `${shown.map((v) => v.toFixed(digits)).join(" + ")} = ${(shown[0] + shown[1]).toFixed(digits)}`;
}

function spread(values, fixed = null) {
  const there = values.filter(finite);
  if (!there.length) return "—";
  const middle = mean(there);
  const digits = fixed ?? (middle >= 100 ? 0 : middle >= 1 ? 1 : 3);
  const deviation = Math.sqrt(there.reduce((a, v) => a + (v - middle) ** 2, 0) / Math.max(1, there.length - 1));
  const text = there.length > 1 ? `${middle.toFixed(digits)} ± ${deviation.toFixed(digits)}` : middle.toFixed(digits);
  return there.length < values.length ? `${text} (${there.length} of ${values.length})` : text;
}

function swatch(look, dash = DASHES[Math.floor(look / 10) % DASHES.length]) {
  const line = shape("line", { x1: 0, x2: 30, y1: 6, y2: 6, stroke: "currentColor", "stroke-width": 3, "stroke-dasharray": dash });
  return shape("svg", { class: `swatch s${look % 10}`, viewBox: "0 0 30 12", "aria-hidden": "true" }, line);
}

// A row a group; rows stay the same elements from update to update, so that the focus is not lost.
// order: {column, sign}, or null: as they came. on: {toggle(label, shown), light(label), sort(column)}.
function runTable(place, groups, target, hidden, order, on) {
  place.known ??= new Map();
  if (!place.tHead) place.append(element("thead", {}, element("tr", {}, ...COLUMNS.map((name, i) => heading(name, i, on.sort)))), element("tbody"));
  COLUMNS.forEach((_, i) => { place.tHead.rows[0].cells[i].ariaSort = order?.column === i ? (order.sign > 0 ? "ascending" : "descending") : null; });
  for (const group of groups) {
    if (!place.known.has(group.label)) place.known.set(group.label, runRow(group, on));
    const row = place.known.get(group.label);
    row.classList.toggle("off", hidden.has(group.label));
    row.querySelector("input").checked = !hidden.has(group.label);
    row.querySelector(".swatch").replaceWith(swatch(group.look));
    const figures = reachedBy(group, target);
    conditions(row.cells[1], group.runs);
    figures.forEach(({ text }, i) => { if (row.cells[i + 2].textContent !== text) row.cells[i + 2].textContent = text; });
    fileLinks(row.cells[8], group.runs);
  }
  const rows = groups.map((g) => place.known.get(g.label));
  if (rows.length !== place.tBodies[0].rows.length || rows.some((r, i) => r !== place.tBodies[0].rows[i])) place.tBodies[0].replaceChildren(...rows);
}

// The columns from accuracy to seconds: what they say, and the number they are sorted by.
function reachedBy({ runs }, target) {
  const got = runs.map((r) => reached(r, target));
  const total = (run, name) => (run.series[name] ? run.series[name].reduce((a, b) => a + (b ?? 0), 0) : null);
  const middle = (values) => (values.some(finite) ? mean(values.filter(finite)) : null);
  const plain = (values, digits) => ({ text: spread(values, digits), key: middle(values) });
  const hundred = (values) => plain(values.map((v) => (finite(v) ? 100 * v : null)), 1);
  const bytes = (sent) => ({ text: bothWays(sent), key: middle(sent.map((ways) => (ways?.every(finite) ? ways[0] + ways[1] : null))) });
  return [
    hundred(runs.map((r) => r.series.test_accuracy?.at(-1) ?? null)), hundred(runs.map((r) => Math.max(...(r.series.test_accuracy ?? []).filter(finite)))),
    plain(got.map((g) => g?.rounds ?? null), runs.length > 1 ? 1 : 0), bytes(got.map((g) => g?.bytes)),
    bytes(runs.map((r) => WAYS.map((way) => total(r, way)))), plain(runs.map((r) => total(r, "seconds"))),
  ];
}

// Groups in the table's order; those without a number in its column come last, either way.
function sorted(groups, order, target) {
  if (!order) return groups;
  const keys = new Map(groups.map((g) => [g, order.column < ACCURACY ? [g.label, g.runs[0].text][order.column] : reachedBy(g, target)[order.column - ACCURACY].key]));
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  const [there, none] = [groups.filter((g) => keys.get(g) !== null), groups.filter((g) => keys.get(g) === null)];
  return [...there.sort((a, b) => order.sign * compare(keys.get(a), keys.get(b))), ...none];
}

// What a click on a heading asks for: the better end first, then the other, then no order.
function nextOrder(order, column) {
  const first = BEST_FIRST.includes(column) ? -1 : 1;
  if (order?.column !== column) return { column, sign: first };
  return order.sign === first ? { column, sign: -first } : null;
}

function heading(name, i, onSort) {
  const button = element("button", { type: "button", title: `sort by ${name}` }, name);
  button.addEventListener("click", () => onSort(i));
  return element("th", { scope: "col", class: i > 1 && i < 8 ? "number" : null }, i < 8 ? button : name);
}

function runRow(group, on) {
  const box = element("input", { type: "checkbox", "aria-label": `show ${group.label}` });
  const name = element("th", { scope: "row" }, element("label", {}, box, swatch(group.look), element("span", {}, group.label)));
  const cells = COLUMNS.slice(1).map((_, i) => element("td", { class: i > 0 && i < 7 ? "number" : null }));
  const row = element("tr", { "data-group": group.label }, name, ...cells);
  box.addEventListener("change", () => on.toggle(group.label, box.checked));
  lightsUp(row, group.label, on.light);
  return row;
}

// Whatever stands for a group: its curves stand out while it is pointed at.
function lightsUp(what, label, light) {
  for (const [event, lit] of [["pointerenter", true], ["focusin", true], ["pointerleave", false], ["focusout", false]]) {
    what.addEventListener(event, () => { what.classList.toggle("lit", lit); light(lit ? label : null); });
  }
}

// Below the curves' controls: which colour is which run.
function legend(place, groups, light) {
  place.replaceChildren(...groups.map((group) => {
    const entry = element("li", { "data-group": group.label }, swatch(group.look), group.label);
    lightsUp(entry, group.label, light);
    return entry;
  }));
}

function conditions(cell, runs) {
  const texts = runs.length === 1 ? [[runs[0].condition, runs[0].text]] : [...new Set(runs.map((r) => r.condition))].map((kind) => {
    const own = runs.filter((r) => r.condition === kind);
    const rounds = own.map((r) => r.rounds.length);
    const why = kind === "failed" ? `\n${own[0].text.replace(/^failed[^:]*: /, "")}` : "";
    const [least, most] = [Math.min(...rounds), Math.max(...rounds)];
    return [kind, `${own.length} ${kind}, ${least}${least < most ? ` to ${most}` : ""} round${most === 1 ? "" : "s"}${why}`];
  });
  const text = texts.map((t) => t[1]).join("\n");
  if (cell.textContent === text) return;
  cell.replaceChildren(...texts.map(([kind, t]) => element("span", { class: kind }, t)));
}

function fileLinks(cell, runs) {
  const wanted = runs.map((r) => JSON.stringify(r.links)).join();
  if (cell.wanted === wanted) return;
  cell.wanted = wanted;
  const lines = runs.map((run) => {
    const links = Object.entries(run.links ?? {});
    const anchors = links.flatMap(([name, at]) => [element("a", { href: at, "aria-label": `${name} of ${run.name}` }, name.replace(/\..*/, "")), " "]);
    return element("div", { class: "files" }, runs.length > 1 ? `seed ${run.seed}: ` : null, ...anchors);
  });
  if (lines.length < 2) return cell.replaceChildren(...lines);
  cell.replaceChildren(element("details", {}, element("summary", {}, `${lines.length} folders`), ...lines));
}
