"use strict";
// Tables of what runs reached, promise, left out, sent, were set to, and gave away.

const last = (values) => values?.filter(finite).at(-1) ?? null;
const named = (group) => [swatch(group.look), element("span", {}, group.label)];

// The columns of results after name and state: heading, a run's value, digits, and 1 if more is better.
function resultColumns(runs, targets) {
  const has = (name) => runs.some((run) => run.series[name]);
  const best = (run) => run.series.test_accuracy?.reduce((a, b) => Math.max(a, b ?? 0), 0);
  const inPercent = (v) => (finite(v) ? 100 * v : null);
  const accuracy = [["accuracy,\u00a0%", (run) => inPercent(last(run.series.test_accuracy)), 1, 1],
    ["best,\u00a0%", (run) => inPercent(best(run)), 1, 1]];
  const aims = targets.flatMap((target) => [
    [`rounds to ${hundred(target)}\u00a0%`, (run) => reached(run, target)[0], 0, -1],
    [`MiB to ${hundred(target)}\u00a0%`, (run) => reached(run, target)[1], null, -1]]);
  const loss = [["test loss", (run) => last(run.series.test_loss), 4, -1]];
  return [...(has("test_accuracy") ? [...accuracy, ...aims] : loss),
    ["MiB in all", (run) => last(AXES.bytes[2](run)), null, -1],
    ["seconds", (run) => last(AXES.seconds[2](run)), null, -1]];
}

// Of a column the mean over a group's seeds; null if no seed has a value.
function middle(group, column) {
  const values = group.runs.map(column[1]).filter(finite);
  return values.length ? mean(values) : null;
}

// Groups by a column's mean, those without one last, whichever way; as they came if no column of this name is there.
function ordered(groups, columns, order) {
  const column = columns.find(([name]) => name === order?.column);
  if (!column) return groups;
  const key = (group) => middle(group, column) ?? -order.sign * Infinity;
  return [...groups].sort((a, b) => order.sign * (key(b) - key(a)) || 0);
}

function resultTable(groups, columns, order, onSort) {
  const headings = columns.map(([name, , , sign]) => {
    const button = element("button", { type: "button", "data-key": name }, name);
    button.addEventListener("click", () => onSort(name, sign));
    return button;
  });
  const lines = ordered(groups, columns, order);
  const made = table(["run", "state", ...headings], lines.map((group) => {
    const { method, changed } = group.runs[0];
    const marked = changed.flatMap((words) => [" ", element("mark", {}, words)]);
    const setting = element("small", {}, method === group.label ? "" : method, marked);
    const digitsOf = (digits) => (digits === 0 && group.runs.length > 1 ? 1 : digits); // means of whole numbers get one
    const values = columns.map(([, value, digits]) => spread(group.runs.map(value), digitsOf(digits)));
    return [[...named(group), setting], states(group.runs), ...values];
  }), 2);
  lines.forEach((group, i) => { made.rows[i + 1].dataset.group = group.label; });
  columns.forEach(([name], i) => {
    if (name === order?.column) made.rows[0].cells[i + 2].ariaSort = order.sign > 0 ? "descending" : "ascending";
  });
  return made;
}

// A line for each state with the number of seeds and rounds, and why a run failed.
function states(runs) {
  if (runs.length === 1) return element("span", { class: runs[0].condition }, runs[0].text);
  return [...new Set(runs.map((run) => run.condition))].map((state) => {
    const own = runs.filter((run) => run.condition === state), rounds = own.map((run) => run.rounds.length);
    const [least, most] = [Math.min(...rounds), Math.max(...rounds)];
    const why = state === "failed" ? `: ${own[0].text.replace(/^failed[^:]*: /, "")}` : "";
    const length = `${least < most ? `${least} to ` : ""}${plural(most, "round")}`;
    return element("div", { class: state }, `${own.length} ${state}, ${length}${why}`);
  });
}

// A row for all groups that say the same; null if none says anything.
function privacyTable(groups) {
  const alike = new Map();
  for (const group of groups) {
    const run = group.runs.find((one) => one.privacy);
    if (run) {
      const said = JSON.stringify([run.privacy, run.audit.canaries]);
      alike.set(said, [...(alike.get(said) ?? []), group]);
    }
  }
  const headings = ["run", "who sees what", "masks", "ε", "δ", "protects", "assumes", "not covered", "canaries"];
  const rows = [...alike].map(([said, own]) =>
    [own.map((group) => element("div", {}, named(group))), ...promised(...JSON.parse(said), own[0].label)]);
  const filled = (_, i) => rows.some((row) => row[i]?.length); // columns in which no row says anything are left out
  return rows.length ? table(headings.filter(filled), rows.map((row) => row.filter(filled))) : null;
}

// Its cells: a line for each guarantee, nothing where there is nothing to say.
function promised(said, canaries, key) {
  const lines = (texts) => texts.filter(Boolean).map((text) => element("div", {}, text));
  const sees = Object.entries(said.sees).map(([role, line]) => element("div", {}, element("b", {}, `${role}: `), line));
  const floor = finite(said.floor) ? `nothing is released of fewer than ${said.floor} clients` : "";
  const sizes = said.guarantees.map(({ epsilon }) => (finite(epsilon) ? `${brief(epsilon)} promised` : "no finite ε"));
  const spent = finite(said.spent) ? `${brief(said.spent)} spent` : "";
  const assumed = said.guarantees.map(({ assumptions }, i) => {
    const list = element("ul", {}, assumptions.map((line) => element("li", {}, line)));
    return folded(`${key} assumes ${i}`, plural(assumptions.length, "assumption"), list);
  });
  const measured = finite(canaries?.shown) && `ε ≥ ${canaries.shown.toFixed(2)} of ${brief(canaries.promised)}`;
  return [
    sees, lines([said.masks || "none", floor]),
    sizes.length ? lines([...sizes, spent, said.simulated ? "simulated" : ""]) : "none: no noise",
    lines(said.guarantees.map(({ delta }) => delta.replace(/e-0?/, "e−"))),
    lines(said.guarantees.map(({ unit, against }) => `a ${unit}, against ${against}`)),
    assumed, said.uncovered, measured || (canaries ? flat(canaries) : ""),
  ];
}

// What rounds left out and which clients failed, by group and reason; null if nothing happened.
function rejectedTable(groups) {
  const reasons = (group) => [...new Set(group.runs.flatMap((run) => run.rejected.map(reasonOf)))];
  const rows = groups.flatMap((group) => reasons(group).map((reason) => {
    const counts = group.runs.map((run) => valuesOf(run, reason) ?? []);
    const first = Math.min(...counts.map((own, i) => group.runs[i].rounds[own.findIndex(Boolean)] ?? Infinity));
    const digits = counts.length > 1 ? 1 : 0;
    return [named(group), reason, spread(counts.map((own) => sums(own).at(-1) ?? 0), digits),
      spread(counts.map((own) => own.filter(Boolean).length), digits), String(first)];
  }));
  return rows.length ? table(["run", "what", "in all", "in rounds", "first in round"], rows, 2) : null;
}

// Bytes by kind of message, means over seeds; null if nothing was sent.
function byteTable(groups) {
  const kinds = (group, way) => [...new Set(group.runs.flatMap((run) => Object.keys(run[way])))].map((kind) => {
    const each = group.runs.map((run) => (run[way][kind] ?? 0) / MIB);
    const rounds = group.runs.map((run, i) => each[i] / Math.max(1, run.rounds.length));
    return [named(group), way, kind, brief(mean(each)), brief(mean(rounds))];
  });
  const rows = groups.flatMap((group) => [...kinds(group, "uplink"), ...kinds(group, "downlink")]);
  return rows.length ? table(["run", "way", "kind", "MiB in all", "MiB a round"], rows, 3) : null;
}

// Settings side by side. ≠: groups differ; marked: differs from the method's default. null if none are known.
function settingTable(groups, onlyDifferences) {
  const known = groups.filter((group) => Object.keys(group.runs[0].settings).length);
  if (!known.length) return null;
  const settings = known.map((group) => group.runs[0].settings);
  const names = new Set(settings.flatMap(Object.keys));
  names.delete("seed");
  const changed = known.map((group) => new Set(group.runs[0].changed.map((words) => words.split(" ")[0])));
  const rows = [...names].map((name) => {
    const [part] = name.split("."), option = name.split(".").at(-1);
    const marked = (i) => ["method", "privacy", "robust"].includes(part) && changed[i].has(option);
    const values = settings.map((own) => own[name] ?? "–"), differ = new Set(values).size > 1;
    const cells = values.map((value, i) => (marked(i) ? element("mark", {}, value) : value));
    return differ || !onlyDifferences ? [differ ? `≠ ${name}` : name, ...cells] : null;
  }).filter(Boolean);
  const headings = ["setting", ...known.map((group) => group.label)];
  return rows.length ? table(headings, rows) : element("p", {}, "No setting differs.");
}

// What `ntkfl audit` found: a verdict for each role, then the attacks; anything else as it is.
function auditOf(run) {
  const found = run.audit.findings, heading = element("h3", {}, run.name);
  if (!found?.verdicts || !Array.isArray(found.findings)) return [heading, element("p", {}, flat(found))];
  const role = (name) => flat(name).replaceAll("+", " and ").replaceAll("-", " ");
  const verdict = ([name, line]) => element("p", {}, element("b", {}, `${role(name)}: `), flat(line));
  const result = (f) => `${flat(f.measure)} ${brief(f.mean)}${f.spread ? ` ± ${brief(f.spread)}` : ""}`;
  const attacks = found.findings.filter(Boolean).map((f) =>
    [flat(f.attack), role(f.role), flat(f.recovers), result(f), brief(f.guess), flat(f.says)]);
  const all = table(["attack", "by", "recovers", "result", "a guess", "in words"], attacks);
  const when = element("p", {}, `Round ${flat(found.round)}, ${flat(found.clients)} clients.`);
  const inside = scrolling(`attacks on ${run.name}`, all);
  const every = folded(`${run.id} attacks`, `Every attack (${attacks.length})`, inside);
  return [heading, when, ...Object.entries(found.verdicts).map(verdict), every];
}

function flat(value) {
  if (finite(value)) return Number.isInteger(value) ? String(value) : brief(value);
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Every run by itself: how it ended, and its files.
function fileTable(runs) {
  const link = (run, file, name) =>
    [element("a", { href: `${run.address}/${file}`, "aria-label": `${name} of ${run.name}` }, name), " "];
  const links = (run) => [page.live ? [] : link(run, "", "folder"), ...run.files.map((file) => link(run, file, file))];
  const row = (run) => [run.name, element("span", { class: run.condition }, run.text), links(run).flat()];
  return table(["run", "state", "files"], runs.map(row));
}
