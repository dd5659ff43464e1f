"use strict";
// The settings side by side, and audits.

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
