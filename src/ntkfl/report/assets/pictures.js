"use strict";
// Bars of bytes by kind of message, and bubbles of clients by classes.

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

// counts: [clients][classes]; a bubble's area is in proportion to its count.
function bubbles(figure, data, everyone) {
  if (!figure.drawn) {
    figure.drawn = true;
    figure.append(element("figcaption"));
    figure.wide = figure.appendChild(element("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "clients and their classes" }));
    figure.svg = figure.wide.appendChild(shape("svg", { role: "img" }));
    sayParts(figure.svg);
  }
  const counts = everyone ? data.counts : data.counts.slice(0, 40);
  const classes = counts[0].length;
  const largest = Math.max(1, ...counts.flat());
  const short = (name) => shortened(name, 18);
  const listed = (found) => (Array.isArray(found) ? found.map(String) : []);
  const [names, kinds] = [listed(data.names), listed(data.classes)];
  const clientName = (i) => names[i] ?? String(i);
  const className = (c) => kinds[c] ?? String(c);
  const room = (found) => 7 * Math.max(0, ...found.map((name) => short(name).length)); // pixels that names take
  const [cell, left, top] = [20, Math.max(34, 14 + room(kinds)), 6];
  const below = names.length ? 26 + room(names.slice(0, counts.length)) : 40;
  const [width, height] = [left + counts.length * cell + 4, top + classes * cell + below];
  const parts = [];
  for (let c = 0; c < classes; c++) {
    const y = top + (classes - 1 - c + 0.5) * cell;
    parts.push(shape("line", { class: "grid", x1: left, x2: width, y1: y, y2: y }));
    parts.push(shape("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, short(className(c))));
  }
  counts.forEach((own, client) => {
    const x = left + (client + 0.5) * cell;
    const foot = top + classes * cell + 8;
    if (names.length) parts.push(shape("text", { x: x + 4, y: foot, "text-anchor": "end", transform: `rotate(-90 ${x + 4} ${foot})` }, short(clientName(client))));
    else if (client % 5 === 0) parts.push(shape("text", { x, y: top + classes * cell + 15, "text-anchor": "middle" }, String(client)));
    own.forEach((count, c) => {
      if (!count) return;
      parts.push(shape("circle", {
        class: "bubble", cx: x, cy: top + (classes - 1 - c + 0.5) * cell, r: ((cell * 0.92) / 2) * Math.sqrt(count / largest),
        "data-say": `client ${clientName(client)}, class ${className(c)}\n${count} samples`,
      }));
    });
  });
  parts.push(shape("text", { class: "title", x: left, y: height - 6 }, `client${counts.length < data.counts.length ? `, the first ${counts.length} of ${data.counts.length}` : ""}; class on the left; the largest bubble is ${largest} samples`));
  figure.querySelector("figcaption").textContent = data.title;
  figure.svg.setAttribute("viewBox", `0 0 ${Math.max(width, 460)} ${height}`);
  figure.svg.style.width = `${Math.max(width, 460)}px`;
  figure.svg.setAttribute("height", height);
  const mixed = mean(data.counts.map((own) => own.filter((n) => n > 0).length));
  figure.svg.setAttribute("aria-label", `${data.title}: ${data.counts.length} clients, ${classes} classes, on average ${mixed.toFixed(1)} classes a client`);
  figure.svg.replaceChildren(...parts);
  numbers(figure, data.title, () => [["client", ...counts[0].map((_, c) => `class ${className(c)}`)], ...counts.map((own, i) => [clientName(i), ...own.map(String)])]);
}
