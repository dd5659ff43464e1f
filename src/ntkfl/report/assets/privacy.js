"use strict";
// What each run promises, on what that rests, and who sees what: as its settings and its last record state it.

// false where no run says anything.
function promises(place, groups) {
  const stated = groups.map((group) => [group, group.runs.find((run) => run.privacy)?.privacy]).filter(([, said]) => said);
  const alike = new Map(); // runs that say the same are said once
  for (const [group, said] of stated) alike.set(JSON.stringify(said), [...(alike.get(JSON.stringify(said)) ?? []), group]);
  place.replaceChildren(...[...alike].flatMap(([said, own]) => [element("h3", {}, ...own.flatMap((g) => [swatch(g.look), `${g.label} `])), promised(JSON.parse(said))]));
  return stated.length > 0;
}

function promised(said) {
  const lines = [];
  const add = (term, ...inside) => lines.push(element("dt", {}, term), element("dd", {}, ...inside));
  for (const one of said.guarantees) {
    const rests = element("details", {}, element("summary", {}, `It rests on ${one.assumptions.length} assumptions`), element("ul", {}, ...one.assumptions.map((line) => element("li", {}, line))));
    add("Guarantee", element("strong", {}, one.says), said.simulated ? " (simulated)" : "", one.assumptions.length ? rests : null);
  }
  if (!said.guarantees.length) add("Guarantee", "none: no noise, so no ε");
  if (said.uncovered) add("Not covered", said.uncovered);
  if (said.spent) add("Spent so far", said.spent);
  add("Secure sums", said.secure_sum ? said.sums || "on: the server learns totals alone" : "off");
  if (finite(said.floor)) add("Floor", `nothing is released of fewer than ${said.floor} clients`);
  for (const [role, line] of Object.entries(said.sees)) add(role === "others" ? "Others see" : `The ${role} sees`, line);
  return element("dl", { class: "promise" }, ...lines);
}
