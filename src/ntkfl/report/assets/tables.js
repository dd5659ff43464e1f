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
  place.replaceChildren(...found.flatMap(([run, { audit, canaries }]) => [
    element("h3", {}, run.name), ...(canaries ? [element("p", { class: "canaries" }, `Canaries against ε: ${canaries}.`)] : []), ...(audit ? foundBy(audit) : []),
  ]));
}

// As `ntkfl audit` writes them: a verdict a role, then the attacks; anything else as it is.
function foundBy(value) {
  if (!value?.verdicts || !Array.isArray(value.findings)) return [nested(value)];
  const verdicts = Object.entries(value.verdicts).flatMap(([role, line]) => [element("dt", {}, roleName(role)), element("dd", {}, flat(line))]);
  const attacks = table([["attack", "by", "recovers", "result", "a guess", "in words"], ...attackRows(value.findings)]);
  attacks.classList.add("words");
  const what = `Round ${flat(value.round)}, ${flat(value.clients)} clients.`;
  const all = element("details", {}, element("summary", {}, `Every attack, ${value.findings.length} of them`), wide("attacks", attacks));
  return [element("p", { class: "note" }, what), element("dl", {}, ...verdicts), all];
}

function attackRows(findings) {
  return findings.map((f) => {
    const result = `${flat(f.measure)} ${brief(f.mean)}${f.spread ? ` ± ${brief(f.spread)}` : ""}`;
    return [flat(f.attack), roleName(f.role), flat(f.recovers), result, brief(f.guess), flat(f.says)];
  });
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
