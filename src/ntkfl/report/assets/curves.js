"use strict";
// Runs as groups (one for each label, over its seeds), and groups as curves.

const METRICS = { // name in the history → its label, its scale, and whether more is better
  test_accuracy: ["test accuracy", "percent", 1],
  last_accuracy: ["test accuracy without averaging", "percent", 1],
  validation_accuracy: ["accuracy on held-out clients", "percent", 1],
  test_loss: ["test loss", "loss", -1],
  train_loss: ["training loss", "loss", -1],
  validation_loss: ["loss on held-out clients", "loss", -1],
  steps: ["steps t chosen", "log", 1],
  kernel_products: ["products with the kernel", "count", 1],
  solver_error: ["largest solver error", "log", -1],
};
const uplink = (run) => run.series.uplink_bytes && sums(run.series.uplink_bytes).map((v) => v / MIB);
const downlink = (run) => run.series.downlink_bytes && sums(run.series.downlink_bytes).map((v) => v / MIB);
const AXES = { // a tab each: its label, its name in front of a value, and where a run's rounds lie
  rounds: ["communication rounds", "round", (run) => run.rounds],
  bytes: ["MiB up and down", "MiB up and down:", (run) => uplink(run)?.map((v, i) => v + (downlink(run)?.[i] ?? 0))],
  up: ["MiB up", "MiB up:", uplink],
  seconds: ["seconds", "seconds:", (run) => run.series.seconds && sums(run.series.seconds)],
};
const reasonOf = (line) => (line.why ? `${line.kind}: ${line.why}` : line.kind);
const valuesOf = (run, metric) => run.series[metric] ?? run.rejected.find((line) => reasonOf(line) === metric)?.counts;

// The metrics that any run has: name → label. What was rejected is there by its reason.
function metricsOf(runs) {
  const known = Object.keys(METRICS).filter((name) => runs.some((run) => run.series[name]));
  const reasons = runs.flatMap((run) => run.rejected.map((line) => [reasonOf(line), `${line.of}, ${reasonOf(line)}`]));
  return new Map([...known.map((name) => [name, METRICS[name][0]]), ...reasons]);
}

// One curve for each group: the mean over its seeds with the band from the lowest to the highest, as far as all seeds
// got; or every seed by itself. A failed run counts if its group has no other.
function curvesOf(groups, axis, metric, apart) {
  return groups.flatMap((group) => {
    const drawn = group.runs.map((run) => ({ run, x: AXES[axis][2](run), y: valuesOf(run, metric) }))
      .filter(({ x, y }) => x?.length && y?.some(finite));
    const whole = drawn.filter(({ run }) => run.condition !== "failed");
    const used = whole.length ? whole : drawn;
    const one = (label, own) => {
      const across = own[0].y.map((_, i) => own.map(({ y }) => y[i]));
      const known = (i) => across[i].every(finite) && own.every(({ x }) => finite(x[i]));
      const rounds = across.map((_, i) => i).filter(known);
      const at = (how) => rounds.map((i) => how(across[i]));
      const band = own.length > 1 ? { low: at((v) => Math.min(...v)), high: at((v) => Math.max(...v)) } : {};
      const x = rounds.map((i) => mean(own.map((each) => each.x[i])));
      return { label, group: group.label, look: group.look, x, y: at(mean), ...band, faint: apart && used.length > 1 };
    };
    const parts = apart ? used.map((each) => [each.run.name, [each]]) : [[group.label, used]];
    return parts.filter(([, own]) => own.length).map(([label, own]) => one(label, own)).filter((c) => c.x.length);
  });
}

// What the chart shows: see chart.js.
function specOf(groups, runs, { axis, metric, targets, apart, xLog, whole }) {
  const [yLabel, kind, up] = METRICS[metric] ?? [metricsOf(runs).get(metric) ?? "", "count", 1];
  const curves = curvesOf(groups, axis, metric, apart);
  const aims = kind === "percent" ? targets : [];
  const ended = kind === "percent" || kind === "loss" ? finish(curves, aims, up) : null;
  const devices = [...new Set(runs.map((run) => run.device).filter(Boolean))].join(", ");
  return {
    curves, up, yLabel, yLog: kind === "log", write: kind === "percent" ? percent : brief, targets: aims,
    xLabel: AXES[axis][0] + (axis === "seconds" && devices ? ` (${devices})` : ""), xName: AXES[axis][1], xLog,
    whole: axis === "rounds", finish: ended, yRange: whole ? null : ended,
  };
}

// Rounds until the accuracy, and MiB up and down until then; nulls where it was not reached.
function reached(run, target) {
  const i = (run.series.test_accuracy ?? []).findIndex((v) => finite(v) && v >= target);
  return i < 0 ? [null, null] : [run.rounds[i], AXES.bytes[2](run)?.[i] ?? null];
}
