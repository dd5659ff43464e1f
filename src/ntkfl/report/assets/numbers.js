"use strict";
// Numbers, and how they are written.

const MIB = 1048576;
const finite = (v) => typeof v === "number" && Number.isFinite(v);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const percent = (v) => (finite(v) ? `${(100 * v).toFixed(1)} %` : "");
const hundred = (v) => Number((100 * v).toFixed(2)); // a part in percent, as a number
const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

// Running totals.
function sums(values) {
  let total = 0;
  return values.map((v) => (total += v ?? 0));
}

// Three digits.
function brief(v) {
  if (!finite(v)) return "";
  const size = Math.abs(v);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return v.toExponential(2).replace("e+", "e").replace("e-", "e−");
  return size >= 1000 ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(3)));
}

// "24.2 ± 0.8": mean and sample standard deviation over the seeds that have a value, which are counted if some do not.
function spread(values, digits = null) {
  const there = values.filter(finite);
  if (!there.length) return "–";
  const middle = mean(there);
  const shown = digits ?? [100, 1, 0.1, 0].findIndex((least) => middle >= least);
  const deviation = Math.sqrt(there.reduce((a, v) => a + (v - middle) ** 2, 0) / (there.length - 1));
  const text = middle.toFixed(shown) + (there.length > 1 ? ` ± ${deviation.toFixed(shown)}` : "");
  return there.length < values.length ? `${text} (${there.length} of ${values.length})` : text;
}

// Round numbers of an axis from low to high, about as many as are wanted.
function linearTicks(low, high, wanted, least = 0) {
  const raw = Math.max(least, (high - low) / Math.max(1, wanted));
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(i * step);
  return found.map((v) => Number(v.toPrecision(12)));
}

// Of a logarithmic axis: 1, 2 and 5 of each power of ten, or powers alone where there are many.
function logTicks(low, high, wanted) {
  const decades = Math.log10(high / low);
  const leads = 3 * decades > wanted ? [1] : [1, 2, 5];
  const skip = Math.max(1, Math.ceil(decades / wanted));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    if (power % skip === 0) found.push(...leads.map((lead) => Number((lead * 10 ** power).toPrecision(1))));
  }
  const inside = found.filter((v) => v >= low && v <= high);
  return inside.length > 1 ? inside : linearTicks(low, high, wanted).filter((v) => v > 0);
}
