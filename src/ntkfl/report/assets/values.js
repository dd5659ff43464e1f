"use strict";
// What clients were worth: a bar for each, and a line of one standard error to both sides.

// known: [[name of the run, {clients: [{client, name, samples, value, error}], left_out}]]
function valueBars(figure, known) {
  framed(figure, () => valueBars(figure, known));
  const title = "part of the squared error that each client's data removed";
  figure.querySelector("figcaption").textContent = title;
  const width = (figure.width = figure.clientWidth || 360);
  const left = 96;
  const all = known.flatMap(([, found]) => found.clients);
  const low = Math.min(0, ...all.map((c) => c.value - c.error));
  const high = Math.max(low + 1e-12, ...all.map((c) => c.value + c.error));
  const at = (v) => left + ((v - low) / (high - low)) * (width - left - 80);
  const parts = [];
  let top = 4;
  for (const [name, found] of known) {
    parts.push(shape("text", { class: "title", x: 0, y: top + 12 }, shortened(name, 60)));
    top += 20;
    const first = top;
    for (const c of found.clients) {
      const who = c.name || `client ${c.client}`;
      const said = `${who}, ${c.samples.toLocaleString("en-US")} samples\n${brief(c.value)}${c.error ? ` ± ${brief(c.error)}` : ""}`;
      parts.push(shape("text", { x: left - 8, y: top + 11, "text-anchor": "end" }, shortened(who, 13)));
      parts.push(shape("rect", {
        class: "worth s0", x: Math.min(at(0), at(c.value)), y: top, width: Math.max(0.5, Math.abs(at(c.value) - at(0))), height: 13, fill: "currentColor",
        "data-client": c.client, "data-say": said,
      }));
      if (c.error) {
        const [a, b] = [at(c.value - c.error), at(c.value + c.error)];
        parts.push(shape("path", { class: "spread", d: `M${a} ${top + 3}v7M${a} ${top + 6.5}H${b}M${b} ${top + 3}v7`, "data-say": said }));
      }
      parts.push(shape("text", { x: Math.max(at(0), at(c.value + c.error)) + 6, y: top + 11 }, brief(c.value)));
      top += 16;
    }
    parts.push(shape("line", { class: "axis", x1: at(0), x2: at(0), y1: first - 2, y2: top }));
    if (found.left_out) {
      parts.push(shape("text", { x: left - 8, y: top + 11 }, `${found.left_out} clients between these are not shown`));
      top += 16;
    }
    top += 10;
  }
  figure.svg.setAttribute("viewBox", `0 0 ${width} ${top}`);
  figure.svg.setAttribute("height", top);
  figure.svg.setAttribute("aria-label", `${title}: ${known.map(([name, found]) => `${name}, ${found.clients.length} clients, from ${brief(found.clients.at(-1).value)} to ${brief(found.clients[0].value)}`).join("; ")}`);
  figure.svg.replaceChildren(...parts);
  numbers(figure, title, () => [["run", "client", "samples", "value", "standard error"], ...known.flatMap(([name, found]) =>
    found.clients.map((c) => [name, c.name || String(c.client), c.samples.toLocaleString("en-US"), brief(c.value), brief(c.error)]))]);
}
