"use strict";
// Elements of the page. All text goes in as text, never as markup: names come from files.

const byId = (id) => document.getElementById(id);

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

// New contents. What has the focus keeps it and what was unfolded stays so, known by its data-key.
function refill(place, ...children) {
  const held = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const open = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.key));
  place.replaceChildren(...children);
  for (const one of place.querySelectorAll("[data-key]")) {
    if (open.has(one.dataset.key)) one.open = true;
    if (one.dataset.key === held) one.focus();
  }
}

// A table of rows of cells; a cell is a text, an element or a list of them. Numbers stand right, from column `numbers`
// on. Each cell knows its heading, which a narrow screen shows in front of it.
function table(headings, rows, numbers = Infinity) {
  const kind = (i) => (i >= numbers ? "number" : null);
  const head = headings.map((name, i) => element("th", { scope: "col", class: kind(i) }, name));
  const cell = (inside, i) => element("td", { class: kind(i + 1), "data-name": head[i + 1].textContent }, inside);
  const row = ([first, ...cells]) => element("tr", {}, element("th", { scope: "row" }, first), cells.map(cell));
  return element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows.map(row)));
}

// Where a wide or long table scrolls by itself.
function scrolling(name, inside) {
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, inside);
}

function folded(key, title, ...inside) {
  return element("details", { "data-key": key }, element("summary", { "data-key": `${key} title` }, title), ...inside);
}

// The values beside the pointer, or beside what has the focus.
function say(lines, x, y) {
  const tip = byId("tip");
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + width > innerWidth ? x - 16 - width : x + 16)}px`;
  tip.style.top = `${Math.min(Math.max(4, y + 16), innerHeight - height - 4)}px`;
}

const hush = () => { byId("tip").hidden = true; };

// Saves a text as a file, without asking any server.
function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name.replace(/[^\p{L}\p{N}.]+/gu, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
