"use strict";
// The page's state, what each control does, and updates of a live page.

const page = JSON.parse(byId("data").textContent);
const runs = new Map(page.runs.map((run) => [run.id, run]));
const DRAWN = 10; // curves that are drawn unless more are asked for
const looks = new Map(); // group → its colour and dash, for good
const hidden = new Set(); // groups that are not drawn
let axis = "rounds"; // the chosen tab
let order = null; // of the results: {column, sign}
let aims = null; // accuracies that were typed in; else those of the comparisons
let logChosen = false; // whether somebody has set the scale of the x-axis; till then it follows the data

const wantedTargets = () => {
  const own = [...new Set([...runs.values()].flatMap((run) => run.targets))].sort();
  return aims ?? (own.length ? own : [0.8, 0.85]);
};

function allGroups() {
  const groups = new Map();
  for (const run of runs.values()) {
    if (!groups.has(run.group)) groups.set(run.group, { label: run.group, runs: [] });
    groups.get(run.group).runs.push(run);
  }
  return [...groups.values()];
}

// New groups get the next looks. Of many the most accurate come first, and those after the tenth are not drawn.
function meet(groups) {
  const fresh = groups.filter((group) => !looks.has(group.label));
  if (looks.size + fresh.length > DRAWN) fresh.sort((a, b) => best(b) - best(a));
  for (const { label } of fresh) {
    looks.set(label, looks.size);
    if (looks.size > DRAWN) hidden.add(label);
  }
  for (const group of groups) group.look = looks.get(group.label);
  groups.sort((a, b) => a.look - b.look);
}

const best = (group) => mean(group.runs.map((run) => last(run.series.test_accuracy) ?? 0));
const shownGroups = (groups) => groups.filter((group) => !hidden.has(group.label));

function drawHead(groups) {
  const list = [...runs.values()];
  const distinct = (of) => [...new Set(list.map(of))].filter((value) => value || value === 0);
  const first = (values, most, join) => values.slice(0, most).join(join) + (values.length > most ? `${join}…` : "");
  const methods = distinct((run) => run.method), changes = distinct((run) => run.changed.join(", "));
  refill(byId("caption"), first(distinct((run) => run.caption), 3, " · "));
  if (methods.length === 1) byId("caption").append(`, ${methods[0]}`);
  if (methods.length === 1 && changes.length === 1) byId("caption").append(": ", element("mark", {}, changes[0]));
  const seeds = distinct((run) => run.seed).sort((a, b) => a - b);
  const states = ["running", "waiting", "finished", "stopped", "failed"].map((state) => {
    const count = list.filter((run) => run.condition === state).length;
    return count ? `${count} ${state}` : "";
  });
  byId("summary").textContent = [
    groups.length > 1 ? plural(groups.length, "curve") : "",
    seeds.length ? `seed${seeds.length > 1 ? "s" : ""} ${first(seeds, 8, ", ")}` : "",
    `${plural(list.length, "run")}: ${states.filter(Boolean).join(", ") || "none yet"}`,
    `ntkfl ${distinct((run) => run.version).join(", ") || page.version}`,
  ].filter(Boolean).join(" · ");
}

function drawLegend(groups) {
  refill(byId("legend"), ...groups.map((group) => {
    const state = { "aria-pressed": String(!hidden.has(group.label)), "data-key": group.label };
    const button = element("button", { type: "button", ...state }, named(group));
    button.addEventListener("click", () => {
      if (!hidden.delete(group.label)) hidden.add(group.label);
      drawAll();
    });
    return lights(element("li", {}, button), group.label);
  }));
  for (const id of ["all", "none"]) byId(id).hidden = groups.length < 2;
}

// The curves of a group stand out while what names it is pointed at.
function lights(what, label) {
  const light = (on) => {
    const faded = (part) => on && part.dataset.group !== label;
    document.querySelectorAll(".curve").forEach((part) => part.classList.toggle("faded", faded(part)));
  };
  for (const [event, on] of [["pointerenter", true], ["focusin", true], ["pointerleave", false], ["focusout", false]]) {
    what.addEventListener(event, () => light(on && !hidden.has(label)));
  }
  return what;
}

function drawChart(groups) {
  const list = [...runs.values()], shown = shownGroups(groups);
  const metrics = metricsOf(list), select = byId("metric"), chosen = select.value;
  refill(select, ...[...metrics].map(([name, label]) => element("option", { value: name }, label)));
  if (metrics.has(chosen)) select.value = chosen;
  byId("metric-label").hidden = metrics.size < 2;
  const lengths = groups.map((group) => Math.max(...group.runs.map((run) => run.rounds.length))).filter(Boolean);
  if (!logChosen) byId("log-x").checked = lengths.length > 1 && Math.max(...lengths) >= 3 * Math.min(...lengths);
  byId("seeds-label").hidden = groups.every((group) => group.runs.length < 2);
  const [apart, xLog, whole] = ["seeds", "log-x", "whole"].map((id) => byId(id).checked);
  const spec = specOf(shown, list, { axis, metric: select.value, targets: wantedTargets(), apart, xLog, whole });
  byId("whole-label").hidden = !spec.finish;
  byId("rings").hidden = !spec.targets.length;
  byId("bands").hidden = !spec.curves.some((c) => c.low);
  show(byId("plot"), spec);
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.ariaSelected = String(tab.dataset.axis === axis);
    tab.tabIndex = tab.dataset.axis === axis ? 0 : -1;
  }
  const [headings, ...points] = byId("numbers").open ? pointsOf(spec) : [[]];
  refill(byId("points"), table(headings, points.map(([label, x, ...y]) => [label, brief(x), ...y.map(spec.write)]), 1));
}

// A section, which is not there where nothing is in it.
function fill(id, made) {
  byId(id).hidden = !made;
  if (made) refill(byId(id).querySelector(".content"), made);
}

function drawAll() {
  const groups = allGroups();
  meet(groups);
  const shown = shownGroups(groups), list = [...runs.values()];
  drawHead(groups);
  drawLegend(groups);
  drawChart(groups);
  const results = resultTable(groups, resultColumns(list, wantedTargets()), order, (column, sign) => {
    order = { column, sign: order?.column === column ? -order.sign : sign };
    drawAll();
  });
  for (const row of results.tBodies[0].rows) lights(row, row.dataset.group);
  refill(byId("results"), results);
  byId("marks").hidden = !list.some((run) => run.changed.length);
  byId("means").hidden = groups.every((group) => group.runs.length < 2);
  byId("aims").hidden = !list.some((run) => run.series.test_accuracy);
  fill("privacy", privacyTable(shown));
  fill("rejected", rejectedTable(shown));
  fill("bytes", byteTable(shown));
  fill("settings", settingTable(shown, byId("differences").checked && shown.length > 1));
  const audited = list.filter((run) => run.audit.findings);
  fill("audit", audited.length ? element("div", {}, audited.flatMap(auditOf)) : null);
  fill("files", list.length ? fileTable(list) : null);
  if (document.activeElement !== byId("targets")) byId("targets").value = wantedTargets().map(hundred).join(", ");
}

for (const id of ["metric", "seeds", "whole", "differences"]) byId(id).addEventListener("change", drawAll);
byId("log-x").addEventListener("change", () => { logChosen = true; drawAll(); });
byId("targets").addEventListener("change", (event) => {
  const typed = event.target.value.split(/[^\d.]+/).map((v) => Number(v) / 100);
  aims = typed.filter((v) => v > 0 && v <= 1);
  if (!aims.length) aims = null;
  drawAll();
});
byId("numbers").addEventListener("toggle", drawAll);
byId("theme").addEventListener("change", () => { document.documentElement.style.colorScheme = byId("theme").value; });
byId("all").addEventListener("click", () => { hidden.clear(); drawAll(); });
byId("none").addEventListener("click", () => { for (const label of looks.keys()) hidden.add(label); drawAll(); });
const tabs = [...document.querySelectorAll("[role=tab]")];
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => { axis = tab.dataset.axis; drawAll(); });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    tabs.at((i + step) % tabs.length).click();
    tabs.at((i + step) % tabs.length).focus();
  });
});
for (const [kind, type, written] of [["svg", "image/svg+xml", asSVG], ["csv", "text/csv", asCSV]]) {
  byId(kind).addEventListener("click", () => {
    const { spec } = byId("plot");
    save(`${page.title} ${spec.yLabel} by ${spec.xLabel}.${kind}`, type, written(spec));
  });
}
drawAll();

// A live page: the server sends the runs that changed, and the order of all.
function follow() {
  const told = (text) => { byId("live").hidden = false; byId("live").textContent = text; };
  const source = new EventSource("events");
  told("connecting …");
  source.addEventListener("runs", (event) => {
    const news = JSON.parse(event.data);
    const known = new Map([...runs, ...news.runs.map((run) => [run.id, run])]);
    runs.clear();
    for (const id of news.order) if (known.has(id)) runs.set(id, known.get(id));
    told("live");
    drawAll();
  });
  source.addEventListener("error", () => told("connection lost: what is shown may be old; trying again"));
}
if (page.live) follow();
