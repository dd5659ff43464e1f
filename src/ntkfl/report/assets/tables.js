"use strict";
// The runs with what they reached, the settings side by side, and audits.

const COLUMNS = ["run", "", "accuracy, %", "best, %", "rounds to target", "MiB up + down to target", "MiB up + down in all", "seconds", "files"];
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
function runTable(place, groups, target, hidden, onToggle, onLight) {
  place.known ??= new Map();
  if (!place.tHead) {
    const head = COLUMNS.map((c, i) => element("th", { scope: "col", class: i > 1 && i < 8 ? "number" : null }, i === 1 ? "condition" : c));
    place.append(element("thead", {}, element("tr", {}, ...head)), element("tbody"));
  }
  for (const group of groups) {
    if (!place.known.has(group.label)) place.known.set(group.label, runRow(group, onToggle, onLight));
    const row = place.known.get(group.label);
    row.classList.toggle("off", hidden.has(group.label));
    row.querySelector("input").checked = !hidden.has(group.label);
    const last = group.runs.map((r) => r.series.test_accuracy?.at(-1) ?? null);
    const best = group.runs.map((r) => Math.max(...(r.series.test_accuracy ?? []).filter(finite)));
    const got = group.runs.map((r) => reached(r, target));
    const total = (run, name) => (run.series[name] ? run.series[name].reduce((a, b) => a + (b ?? 0), 0) : null);
    const hundred = (values) => spread(values.map((v) => (finite(v) ? 100 * v : null)), 1);
    const texts = [
      hundred(last), hundred(best), spread(got.map((g) => g?.rounds ?? null), group.runs.length > 1 ? 1 : 0),
      bothWays(got.map((g) => g?.bytes)), bothWays(group.runs.map((r) => WAYS.map((way) => total(r, way)))), spread(group.runs.map((r) => total(r, "seconds"))),
    ];
    conditions(row.cells[1], group.runs);
    texts.forEach((text, i) => { if (row.cells[i + 2].textContent !== text) row.cells[i + 2].textContent = text; });
    fileLinks(row.cells[8], group.runs);
  }
  const rows = groups.map((g) => place.known.get(g.label));
  if (rows.length !== place.tBodies[0].rows.length || rows.some((r, i) => r !== place.tBodies[0].rows[i])) place.tBodies[0].replaceChildren(...rows);
}

function runRow(group, onToggle, onLight) {
  const box = element("input", { type: "checkbox", "aria-label": `show ${group.label}` });
  const name = element("th", { scope: "row" }, element("label", {}, box, swatch(group.look), element("span", {}, group.label)));
  const cells = COLUMNS.slice(1).map((_, i) => element("td", { class: i > 0 && i < 7 ? "number" : null }));
  const row = element("tr", { "data-group": group.label }, name, ...cells);
  box.addEventListener("change", () => onToggle(group.label, box.checked));
  for (const [event, lit] of [["pointerenter", true], ["focusin", true], ["pointerleave", false], ["focusout", false]]) {
    row.addEventListener(event, () => { row.classList.toggle("lit", lit); onLight(lit ? group.label : null); });
  }
  return row;
}

function ago(since) {
  const seconds = Math.max(0, Date.now() / 1000 - since);
  return seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function conditions(cell, runs) {
  const quiet = runs[0].since ? `, last sign ${ago(runs[0].since)} ago` : "";
  const texts = runs.length === 1 ? [[runs[0].condition, runs[0].text + (page.live ? quiet : "")]] : [...new Set(runs.map((r) => r.condition))].map((kind) => {
    const own = runs.filter((r) => r.condition === kind);
    const rounds = own.map((r) => r.of ?? r.rounds.length);
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
    const links = Object.entries(run.links ?? {}).filter(([name]) => !name.startsWith("audit/"));
    const anchors = links.flatMap(([name, at]) => [element("a", { href: at, "aria-label": `${name} of ${run.name}` }, name.replace(/\..*/, "")), " "]);
    return element("div", { class: "files" }, runs.length > 1 ? `seed ${run.seed}: ` : null, ...anchors);
  });
  if (lines.length < 2) return cell.replaceChildren(...lines);
  cell.replaceChildren(element("details", {}, element("summary", {}, `${lines.length} folders`), ...lines));
}

// What differs between the groups shown is marked by colour, weight and a sign.
function settingTable(place, groups, onlyDifferences) {
  const columns = groups.filter((g) => g.runs.some((r) => Object.keys(r.settings).length));
  const names = [...new Set(columns.flatMap((g) => Object.keys(g.runs[0].settings)))];
  const many = columns.length > 1;
  const rows = [];
  for (const name of names) {
    const values = columns.map((g) => [...new Set(g.runs.map((r) => r.settings[name] ?? "—"))].join(" / "));
    const differs = many && new Set(values).size > 1;
    if (many && onlyDifferences && !differs) continue;
    const often = (v) => values.filter((w) => w === v).length;
    const usual = values.reduce((a, b) => (often(b) > often(a) ? b : a));
    const marked = differs && often(usual) > 1 ? (v) => v !== usual : () => differs;
    rows.push(element("tr", differs ? { class: "differing" } : {}, element("th", { scope: "row" }, differs ? `≠ ${name}` : name),
      ...values.map((v) => element("td", { class: marked(v) ? "differs" : null }, v))));
  }
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: columns.length + 1 }, columns.length ? "No setting differs." : "No run is shown.")));
  const head = element("tr", {}, element("th", { scope: "col" }, "setting"), ...columns.map((g) => element("th", { scope: "col" }, g.label)));
  place.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

function audits(place, found) {
  place.replaceChildren(...found.flatMap(([run, audit]) => [
    element("h3", {}, run.name),
    ...(audit.findings === null ? [element("p", { class: "note" }, "There is no findings.json beside the pictures.")] : foundBy(audit.findings)),
    ...audit.pictures.map((p) => wide(`picture ${p.name}`, element("img", { src: p.source ?? run.links[`audit/${p.name}`], alt: `${p.name} of the audit of ${run.name}` }))),
    ...(audit.left_out.length ? [element("p", { class: "note" }, `Too large for this page: ${audit.left_out.join(", ")} in the run's folder audit.`)] : []),
  ]));
}

// As `ntkfl audit` writes them: a verdict a role, then the attacks; anything else as it is.
function foundBy(value) {
  if (!value?.verdicts || !Array.isArray(value.findings)) return [nested(value)];
  const verdicts = Object.entries(value.verdicts).flatMap(([role, line]) => [element("dt", {}, roleName(role)), element("dd", {}, flat(line))]);
  const attacks = table([["attack", "by", "recovers", "result", "a guess", "without defences", "so it is", "in words"], ...attackRows(value.findings)]);
  attacks.classList.add("words");
  const what = `Round ${flat(value.round)}, ${flat(value.clients)} clients${value.settings?.quick ? "; a quick audit, of few pictures and steps" : ""}.`;
  const all = element("details", {}, element("summary", {}, `Every attack, ${value.findings.length} of them`), wide("attacks", attacks));
  return [element("p", { class: "note" }, what), element("dl", {}, ...verdicts), all];
}

// Attacks that two pairs of roles do alike are one row.
function attackRows(findings) {
  const rows = new Map();
  for (const f of findings) {
    const result = `${flat(f.measure)} ${brief(f.mean)}${f.spread ? ` ± ${brief(f.spread)}` : ""}`;
    const rest = [flat(f.recovers), result, brief(f.guess), f.reference === null || f.reference === undefined ? "—" : brief(f.reference), flat(f.verdict), flat(f.says)];
    const key = JSON.stringify([f.attack, ...rest]);
    if (rows.has(key)) rows.get(key)[1] += `; ${roleName(f.role)}`;
    else rows.set(key, [flat(f.attack), roleName(f.role), ...rest]);
  }
  return [...rows.values()];
}

function roleName(role) {
  return flat(role).replaceAll("+", " and ").replaceAll("-", " ");
}

function wide(name, ...inside) {
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, ...inside);
}

// Whatever JSON: a list of like objects as a table, an object as names and values.
function nested(value, depth = 0) {
  if (Array.isArray(value) && value.length && value.every((v) => v && typeof v === "object" && !Array.isArray(v))) {
    const names = [...new Set(value.flatMap(Object.keys))];
    const made = table([names, ...value.map((v) => names.map((n) => flat(v[n])))]);
    return wide("findings", made);
  }
  if (value && typeof value === "object" && !Array.isArray(value) && depth < 3) {
    return element("dl", {}, ...Object.entries(value).flatMap(([k, v]) => [element("dt", {}, k), element("dd", {}, nested(v, depth + 1))]));
  }
  return element("span", {}, flat(value));
}

function flat(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : brief(value);
  if (value === null || value === undefined) return "—";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
