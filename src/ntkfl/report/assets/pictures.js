"use strict";
// Bars of bytes by kind of message.

// groups: [{label, up: {kind: bytes}, down: {kind: bytes}}]
function byteBars(figure, groups, title) {
  framed(figure, () => byteBars(figure, groups, title));
  figure.querySelector("figcaption").textContent = title;
  const width = (figure.width = figure.clientWidth || 360);
  const kinds = [...new Set(groups.flatMap((g) => [...Object.keys(g.up).map((k) => `${k} ↑`), ...Object.keys(g.down).map((k) => `${k} ↓`)]))];
  const total = (by) => Object.values(by).reduce((a, b) => a + b, 0);
  const largest = Math.max(1, ...groups.flatMap((g) => [total(g.up), total(g.down)]));
  const narrow = width < 560;
  const left = narrow ? 0 : Math.min(330, width * 0.3);
  const room = width - left - 92;
  const parts = [];
  let top = 4;
  for (const group of groups) {
    const name = shortened(group.label, Math.floor((narrow ? width : left - 10) / 6.8));
    if (narrow) top += 16;
    parts.push(shape("text", { class: "title", x: narrow ? 0 : left - 10, y: narrow ? top - 4 : top + 19, "text-anchor": narrow ? "start" : "end" }, name));
    for (const [by, arrow] of [[group.up, "↑"], [group.down, "↓"]]) {
      let x = left + 16;
      parts.push(shape("text", { x: left + 2, y: top + 11 }, arrow));
      for (const [kind, bytes] of Object.entries(by)) {
        const wide = Math.max(0.5, (bytes / largest) * (room - 16));
        parts.push(shape("rect", {
          class: `segment s${kinds.indexOf(`${kind} ${arrow}`) % 10}`, x, y: top, width: wide, height: 13, fill: "currentColor",
          "data-kind": kind, "data-say": `${group.label}\n${kind} ${arrow === "↑" ? "up" : "down"}: ${brief(bytes / MIB)} MiB`,
        }));
        x += wide;
      }
      parts.push(shape("text", { x: x + 6, y: top + 11 }, `${brief(total(by) / MIB)} MiB`));
      top += 15;
    }
    top += 9;
  }
  let x = narrow ? 0 : left;
  top += 14;
  kinds.forEach((kind, i) => {
    const wide = 26 + 7.2 * kind.length;
    if (x + wide > width) [x, top] = [narrow ? 0 : left, top + 18];
    parts.push(shape("rect", { class: `s${i % 10}`, x, y: top - 9, width: 11, height: 11, fill: "currentColor" }));
    parts.push(shape("text", { x: x + 16, y: top + 1 }, kind));
    x += wide;
  });
  figure.svg.setAttribute("viewBox", `0 0 ${width} ${top + 8}`);
  figure.svg.setAttribute("height", top + 8);
  figure.svg.setAttribute("aria-label", `${title}: ${groups.map((g) => `${g.label} ${brief(total(g.up) / MIB)} MiB up, ${brief(total(g.down) / MIB)} MiB down`).join("; ")}`);
  figure.svg.replaceChildren(...parts);
  numbers(figure, title, () => [["", "direction", "kind", "MiB"], ...groups.flatMap((g) =>
    [["up", g.up], ["down", g.down]].flatMap(([way, by]) => Object.entries(by).map(([kind, bytes]) => [g.label, way, kind, brief(bytes / MIB)])))]);
}
