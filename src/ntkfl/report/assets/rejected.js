"use strict";
// What was rejected: a curve and a row for each run and reason. A run's colour, and a dash for the reason.

const REASON_DASHES = [null, "7 4", "2 4", "9 4 2 4", "14 4", "4 2", "2 8", "12 4 2 4 2 4"];

// charts: [[what is counted, its figure, its title]]; false where there is nothing to show.
function rejections(charts, place, groups, apart) {
  const lines = groups.flatMap((g) => g.runs.flatMap((run) => run.rejected ?? []));
  if (!lines.length) return false;
  const names = [...new Set(lines.map((line) => line.series))];
  const dashes = new Map(names.map((name, i) => [name, REASON_DASHES[i % REASON_DASHES.length]]));
  const called = new Map(lines.map((line) => [line.series, line.why ? `${line.kind}: ${line.why}` : line.kind]));
  for (const [unit, figure, title] of charts) {
    const own = names.filter((name) => lines.some((line) => line.series === name && line.of === unit));
    const series = own.flatMap((name) => curves(groups, (run) => run.rounds, (run) => run.series[name], apart).map((s) => (
      { ...s, id: `${s.id}/${name}`, label: `${s.label}\n${called.get(name)}`, dash: dashes.get(name), notes: null })));
    lineChart(figure, { title, xLabel: "communication rounds", xName: "round", yName: unit, yFormat: brief, xFloor: 0, series });
  }
  place.replaceChildren(...rejectedRows(groups, names, called, dashes));
  return true;
}

function rejectedRows(groups, names, called, dashes) {
  const headings = ["run", "what", "in all", "in rounds", "first in round"];
  const head = element("tr", {}, ...headings.map((h, i) => element("th", { scope: "col", class: i > 1 ? "number" : null }, h)));
  const rows = groups.flatMap((group) => names.flatMap((name) => {
    const own = group.runs.map((run) => (run.rejected ?? []).find((line) => line.series === name));
    if (!own.some(Boolean)) return [];
    const all = (key) => spread(own.map((line) => line?.[key] ?? 0), group.runs.length > 1 ? 1 : 0);
    const first = Math.min(...own.filter(Boolean).map((line) => line.first));
    const who = element("th", { scope: "row" }, swatch(group.look, dashes.get(name)), group.label);
    return [element("tr", {}, who, element("td", { class: "why" }, called.get(name)), ...[all("total"), all("rounds"), String(first)].map((text) => element("td", { class: "number" }, text)))];
  }));
  return [element("thead", {}, head), element("tbody", {}, ...rows)];
}
