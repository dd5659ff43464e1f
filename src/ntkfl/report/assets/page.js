"use strict";
// The page's state, what each control does, and updates of a live page.

const METRICS = {
  test_accuracy: ["test accuracy", true], last_accuracy: ["test accuracy without averaging", true], validation_accuracy: ["accuracy on held-out clients", true],
  test_loss: ["test loss", false], train_loss: ["training loss", false], validation_loss: ["loss on held-out clients", false],
};
const page = JSON.parse(byId("data").textContent);
const runs = new Map(page.runs.map((run) => [run.id, run]));
const details = new Map(Object.entries(page.details ?? {}));
const DRAWN = 10; // curves that are shown unless more are asked for: as many as there are colours
const looks = new Map(); // group → its colour and dash
const hidden = new Set();
const met = new Set(); // groups that were there before
let order = null; // of the table's rows
const touched = new Set(); // controls whose defaults no longer follow the data
const charts = ["by-round", "by-bytes", "by-seconds", "steps", "products", "error", "rejected-rows", "rejected-clients"].map(byId);

function allGroups() {
  const groups = new Map();
  for (const run of runs.values()) {
    if (!groups.has(run.group)) groups.set(run.group, []);
    groups.get(run.group).push(run);
  }
  return sorted([...groups].map(([label, own]) => ({ label, look: looks.get(label) ?? 0, runs: own })), order, target());
}

const target = () => Number(byId("target").value) / 100;
const shownGroups = () => allGroups().filter((g) => !hidden.has(g.label));

// Of new groups as many are shown as make ten, the first of the table: where there are more, that begins with the most accurate.
function meet() {
  if (!touched.has("order")) order = new Set([...runs.values()].map((run) => run.group)).size > DRAWN ? { column: ACCURACY, sign: -1 } : null;
  for (const { label } of allGroups()) {
    if (!met.has(label) && met.size - hidden.size >= DRAWN) hidden.add(label);
    met.add(label);
  }
}

// Every group that is shown has a look of its own: its last one, unless another has taken it meanwhile, else the first that is free.
function dress() {
  const shown = shownGroups().map((g) => g.label);
  const taken = new Set(shown.map((label) => looks.get(label)));
  for (const label of shown.filter((one) => !looks.has(one))) {
    let free = 0;
    while (taken.has(free)) free++;
    for (const [other, look] of looks) if (look === free) looks.delete(other);
    looks.set(label, free);
    taken.add(free);
  }
}

// One curve a group: the mean over its seeds and their range, or every seed by itself.
function curves(groups, xOf, yOf, apart) {
  const found = [];
  for (const group of groups) {
    const own = group.runs.map((run) => ({ run, x: xOf(run), y: yOf(run) })).filter((c) => c.x && c.y);
    if (!own.length) continue;
    const base = { group: group.label, look: group.look };
    if (own.length === 1 || apart) {
      for (const { run, x, y } of own) {
        const there = y.map((_, i) => i).filter((i) => finite(y[i]) && finite(x[i]));
        found.push({ ...base, id: run.id, label: run.name, x: there.map((i) => x[i]), y: there.map((i) => y[i]), notes: there.map((i) => `round ${run.rounds[i]}`), faint: own.length > 1 });
      }
      continue;
    }
    const shortest = Math.min(...own.map((c) => c.y.length));
    const across = Array.from({ length: shortest }, (_, i) => own.map((c) => c.y[i]));
    const there = across.map((_, i) => i).filter((i) => across[i].every(finite));
    found.push({
      ...base, id: group.label, label: `${group.label}, mean of ${own.length} seeds`, x: there.map((i) => mean(own.map((c) => c.x[i]))), y: there.map((i) => mean(across[i])),
      low: there.map((i) => Math.min(...across[i])), high: there.map((i) => Math.max(...across[i])), notes: there.map((i) => `round ${own[0].run.rounds[i]}`),
    });
  }
  return found;
}

function drawCurves() {
  const groups = shownGroups();
  const metric = byId("metric").value;
  const [name, isPart] = METRICS[metric];
  const [logX, down, apart] = ["log-x", "down", "seeds"].map((id) => byId(id).checked);
  const value = (run) => run.series[metric];
  const bytes = (run) => run.series.uplink_bytes && sums(run.series.uplink_bytes.map((b, i) => (b + (down ? run.series.downlink_bytes?.[i] ?? 0 : 0)) / MIB));
  const y = isPart ? { yFormat: (v) => percent(v, 2), yTick: (v) => `${tick(Number((100 * v).toPrecision(10)))} %`, targets: [target()] } : { yFormat: brief };
  const shared = { ...y, yName: name, xLog: logX };
  const devices = [...new Set([...runs.values()].map((r) => r.device).filter(Boolean))].join(", ");
  const panel = (id, title, xLabel, xOf, xName) => lineChart(byId(id), { ...shared, title: `${name} by ${title}`, xLabel, xName, xFloor: 0, series: curves(groups, xOf, value, apart) });
  panel("by-round", "rounds", "communication rounds", (run) => run.rounds, "round");
  panel("by-bytes", "bytes", down ? "MiB up and down" : "MiB up", bytes, "MiB");
  panel("by-seconds", "seconds", devices ? `seconds (${devices})` : "seconds", (run) => run.series.seconds && sums(run.series.seconds), "seconds");
  for (const id of ["by-round"]) for (const s of byId(id).spec.series) s.notes = null;
}

function drawServer() {
  const groups = shownGroups();
  const apart = byId("seeds").checked;
  const panel = (id, name, title, yLog) => {
    const series = curves(groups, (run) => run.rounds, (run) => run.series[name], apart).map((s) => ({ ...s, notes: null }));
    lineChart(byId(id), { title, xLabel: "communication rounds", xName: "round", yName: title, yFormat: brief, yLog, xFloor: 0, series });
    return series.length;
  };
  const drawn = [panel("steps", "steps", "steps t chosen", true), panel("products", "kernel_products", "products with the kernel", false), panel("error", "solver_error", "largest solver error", true)];
  byId("rounds").hidden = !drawn.some(Boolean);
}

function drawRejections() {
  const figures = [["rows", byId("rejected-rows"), "rows or updates in each round"], ["clients", byId("rejected-clients"), "clients in each round"]];
  byId("rejections").hidden = !rejections(figures, byId("rejected-table"), shownGroups(), byId("seeds").checked);
}

function drawBytes() {
  const each = byId("per").value === "round";
  const average = (group, way) => {
    const total = {};
    for (const run of group.runs) for (const [kind, bytes] of Object.entries(run[way])) {
      total[kind] = (total[kind] ?? 0) + bytes / group.runs.length / (each ? Math.max(1, run.rounds.length) : 1);
    }
    return total;
  };
  const groups = shownGroups().map((g) => ({ label: g.label, up: average(g, "uplink"), down: average(g, "downlink") }));
  byteBars(byId("kinds"), groups, each ? "MiB a round, all its clients together" : "MiB in all rounds, all clients together");
}

function drawDetails() {
  const known = [...details].filter(([id]) => runs.has(id)).map(([id, found]) => [runs.get(id), found]);
  const audited = known.filter(([, found]) => found.audit || found.canaries);
  byId("audits").hidden = !audited.length;
  audits(byId("audit"), audited);
}

function drawAll() {
  meet();
  const groups = allGroups();
  const list = [...runs.values()];
  const there = Object.keys(METRICS).filter((name) => list.some((run) => run.series[name]));
  const available = there.length ? there : ["test_accuracy"];
  const metric = byId("metric");
  if (available.join() !== [...metric.options].map((o) => o.value).join()) {
    const before = metric.value;
    metric.replaceChildren(...available.map((name) => element("option", { value: name }, METRICS[name][0])));
    if (available.includes(before)) metric.value = before;
  }
  const lengths = groups.map((g) => Math.max(...g.runs.map((r) => r.rounds.length))).filter((n) => n > 0);
  if (!touched.has("log-x")) byId("log-x").checked = lengths.length > 1 && Math.max(...lengths) >= 3 * Math.min(...lengths);
  if (!touched.has("differences")) byId("differences").checked = groups.length > 1;
  byId("seeds-label").hidden = groups.every((g) => g.runs.length < 2);
  const counts = ["running", "waiting", "finished", "stopped", "failed"].map((kind) => [kind, list.filter((r) => r.condition === kind).length]).filter(([, n]) => n);
  const captions = [...new Set(list.map((r) => r.caption).filter(Boolean))];
  byId("caption").textContent = captions.slice(0, 3).join(" · ") + (captions.length > 3 ? ` · and ${captions.length - 3} more settings` : "");
  byId("summary").textContent = `${list.length} run${list.length === 1 ? "" : "s"}: ${counts.map(([kind, n]) => `${n} ${kind}`).join(", ") || "none yet"}`;
  drawSelection();
}

const lightCurves = (group) => charts.forEach((figure) => figure.spec && light(figure, group));

function drawRuns() {
  runTable(byId("run-table"), allGroups(), target(), hidden, order, { toggle, light: lightCurves, sort });
}

function drawSelection() {
  dress();
  drawRuns();
  const shown = shownGroups();
  const all = allGroups().length;
  byId("first").hidden = all <= DRAWN;
  byId("drawn").hidden = shown.length === all;
  byId("drawn").textContent = `${shown.length} of ${all} runs are drawn: tick others in the table.`;
  legend(byId("legend"), shown, lightCurves);
  drawCurves();
  drawServer();
  drawRejections();
  byId("privacy").hidden = !promises(byId("promises"), shownGroups());
  drawBytes();
  settingTable(byId("setting-table"), shownGroups(), byId("differences").checked);
  drawDetails();
}

function toggle(group, shown) {
  if (shown) hidden.delete(group);
  else hidden.add(group);
  drawSelection();
}

function sort(column) {
  touched.add("order");
  order = nextOrder(order, column);
  drawSelection();
}

function theme(name) {
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = name;
}

for (const [id, redraw] of Object.entries({ metric: drawCurves, "log-x": drawCurves, down: drawCurves, seeds: drawSelection, target: drawSelection, per: drawBytes, differences: drawSelection })) {
  byId(id).addEventListener("change", () => { touched.add(id); redraw(); });
}
// The first so many of the table, with colours dealt anew.
function showFirst(count) {
  allGroups().forEach((g, i) => (i < count ? hidden.delete(g.label) : hidden.add(g.label)));
  looks.clear();
  drawSelection();
}

for (const [id, count] of [["all", Infinity], ["none", 0], ["first", DRAWN]]) byId(id).addEventListener("click", () => showFirst(count));
byId("theme").addEventListener("change", (event) => theme(event.target.value));
byId("target").value = page.targets.length ? 100 * page.targets.at(-1) : 85;
byId("made").textContent = `ntkfl ${page.version}`;
drawAll();

// A live page: the server sends the runs that changed; details are asked for when a run has ended.
function follow() {
  const status = byId("live");
  const told = (text) => { status.hidden = false; status.textContent = text; };
  const source = new EventSource("events");
  const asked = new Map();
  told("connecting …");
  source.addEventListener("runs", (event) => {
    const news = JSON.parse(event.data);
    const known = new Map(runs);
    runs.clear();
    for (const run of news.runs) known.set(run.id, run);
    for (const id of news.order) if (known.has(id)) runs.set(id, known.get(id));
    told("live");
    drawAll();
    for (const group of allGroups()) {
      const run = group.runs.find((r) => r.rounds.length && r.condition !== "running");
      if (run && asked.get(run.id) !== run.rounds.at(-1)) {
        asked.set(run.id, run.rounds.at(-1));
        fetch(`details/${run.id}`).then((answer) => (answer.ok ? answer.json() : null)).then((found) => {
          if (found) details.set(run.id, found);
          drawDetails();
        }).catch(() => asked.delete(run.id));
      }
    }
  });
  source.addEventListener("error", () => told("connection lost: what is shown may be old; trying again"));
}
if (page.live) follow();
