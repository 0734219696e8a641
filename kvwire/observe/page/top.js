// The page of `kvwire top`. It fetches top.json and shows its tables.
//
// Names in them are chosen by peers, so a text is only ever a text node: nothing here
// makes markup of a string, and the page's policy forbids that as well.
"use strict";

const EVERY_MS = 1000;
const PATIENCE_MS = 10000;
// More rows than these are shown when they are asked for.
const ROWS = 100;
// The seconds of a plotted line, one number for each look.
const PLOTTED = 120;

const byId = (id) => document.getElementById(id);
// The key of the link's fragment, which browsers send to nobody.
let key = location.hash.slice(1);
let paused = false;
let timer = 0;
let asking = false;
let answeredAt = 0;
let shown = null;
const wholeTables = new Set();
// The last numbers of each plotted cell, by table, row and column.
let plots = new Map();

async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  let goOn = true;
  try {
    goOn = await look();
  } finally {
    asking = false;
    if (goOn && !paused && !document.hidden) timer = setTimeout(ask, EVERY_MS);
  }
}

// Asks once; returns whether to ask again without a reader's doing.
async function look() {
  let answer;
  try {
    answer = await fetch("top.json", {
      // What is no key is not sent: a header takes only some characters.
      headers: /^[0-9a-f]+$/i.test(key) ? { Authorization: `Bearer ${key}` } : {},
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
  } catch (error) {
    const late = error.name === "TimeoutError";
    trouble(late ? `no answer within ${PATIENCE_MS / 1000} s` : "the server does not answer");
    return true;
  }
  const said = await answer.json().catch(() => ({}));
  const refused = answer.status === 401 || answer.status === 403;
  byId("login").hidden = !refused;
  if (refused) {
    setText(byId("refused"), said.error || "the server asks for a key");
    show({ name: "", tables: [], notes: [] });
    document.body.classList.remove("trouble");
    setText(byId("state"), "no access");
    return false;
  }
  if (!answer.ok || !said.tables) {
    trouble(said.error || `the server answers with status ${answer.status}`);
    return true;
  }
  answeredAt = Date.now();
  document.body.classList.remove("trouble");
  keepPlots(said);
  show(said);
  sayState();
  return true;
}

function trouble(why) {
  document.body.classList.add("trouble");
  const old = Math.round((Date.now() - answeredAt) / 1000);
  const since = answeredAt ? `; what is below is ${old} s old` : "";
  byId("state").textContent = why + since;
}

function sayState() {
  const time = new Date(answeredAt).toLocaleTimeString();
  byId("state").textContent = paused ? `paused at ${time}` : `live, ${time}`;
}

// --- what is plotted

function keepPlots(view) {
  const kept = new Map();
  for (const table of view.tables) {
    for (const row of table.rows) {
      row.cells.forEach((cell, at) => {
        if (cell.plot === undefined || cell.plot === null) return;
        const name = JSON.stringify([table.name, row.key, at]);
        const numbers = plots.get(name) || [];
        numbers.push(cell.plot);
        kept.set(name, numbers.slice(-PLOTTED));
      });
    }
  }
  plots = kept;
}

function plotted(numbers) {
  const space = "http://www.w3.org/2000/svg";
  const drawn = document.createElementNS(space, "svg");
  drawn.setAttribute("class", "plot");
  drawn.setAttribute("viewBox", `0 0 ${PLOTTED} 18`);
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(space, "polyline");
  const most = Math.max(...numbers, 1e-9);
  const first = PLOTTED - numbers.length;
  const points = numbers.map((number, at) => `${first + at},${17 - (16 * number) / most}`);
  line.setAttribute("points", points.join(" "));
  line.setAttribute("vector-effect", "non-scaling-stroke");
  drawn.append(line);
  return drawn;
}

// --- tables

function show(view) {
  shown = view;
  byId("name").textContent = view.name;
  document.title = view.name ? `${view.name} - kvwire top` : "kvwire top";
  fit(byId("notes"), view.notes, () => document.createElement("li"), (item, note) => {
    setText(item, note);
  });
  fit(byId("tables"), view.tables, () => document.createElement("section"), showTable);
}

// Gives a parent one child for each value, and keeps the children that are there.
function fit(parent, values, make, fill) {
  while (parent.children.length > values.length) parent.lastElementChild.remove();
  values.forEach((value, at) => {
    const child = parent.children[at] || parent.appendChild(make(value));
    fill(child, value, at);
  });
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function showTable(section, table) {
  const wanted = byId("filter").value.toLowerCase();
  const rows = table.rows.filter((row) => !wanted || textOf(row).includes(wanted));
  const whole = wholeTables.has(table.name) || rows.length <= ROWS;
  const part = whole ? rows : rows.slice(0, ROWS);
  if (section.dataset.table !== table.name) {
    section.dataset.table = table.name;
    section.replaceChildren(...frame(table));
  }
  const [head, none, drawn, more] = section.children;
  const all = table.total || table.rows.length;
  const cut = all > part.length ? `${part.length} of ${all.toLocaleString("en")}` : all.toLocaleString("en");
  setText(head.lastElementChild, all ? ` ${cut}` : "");
  none.hidden = rows.length > 0;
  setText(none, wanted && all ? "no row has this text" : "nothing");
  drawn.hidden = !rows.length;
  more.hidden = whole && !wholeTables.has(table.name);
  setText(more, whole ? `show ${ROWS} only` : `show all ${rows.length.toLocaleString("en")} rows`);
  const cells = (line, row) => {
    fit(line, row.cells, () => document.createElement("td"), (cell, value, at) => {
      showCell(cell, value, table.columns[at], JSON.stringify([table.name, row.key, at]));
    });
  };
  fit(drawn.tBodies[0], part, () => document.createElement("tr"), cells);
}

function textOf(row) {
  const texts = row.cells.map((cell) => (typeof cell === "string" ? cell : cell.text));
  return texts.join(" ").toLowerCase();
}

// What a table has beside its rows.
function frame(table) {
  const head = document.createElement("h2");
  const count = document.createElement("span");
  count.className = "count";
  head.append(table.title, count);
  const none = document.createElement("p");
  none.className = "none";
  const drawn = document.createElement("table");
  const line = drawn.createTHead().insertRow();
  for (const column of table.columns) {
    const name = document.createElement("th");
    name.scope = "col";
    name.textContent = column.name;
    if (column.about) name.title = column.about;
    if (column.number) name.className = "number";
    line.append(name);
  }
  drawn.createTBody();
  const more = document.createElement("button");
  more.type = "button";
  more.className = "more";
  more.addEventListener("click", () => {
    if (!wholeTables.delete(table.name)) wholeTables.add(table.name);
    show(shown);
  });
  return [head, none, drawn, more];
}

function showCell(cell, value, column, name) {
  const text = typeof value === "string" ? value : value.text;
  const classes = [];
  if (column.number) classes.push("number");
  if (value.alarm) classes.push("alarm");
  if (!text) classes.push("blank");
  const wanted = classes.join(" ");
  if (cell.className !== wanted) cell.className = wanted;
  if (cell.dataset.column !== column.name) cell.dataset.column = column.name;
  const numbers = plots.get(name);
  const share = value.share ?? null;
  if (share === null && !numbers) {
    setText(cell, text);
    return;
  }
  const words = document.createElement("span");
  words.textContent = text;
  cell.replaceChildren(words);
  if (share !== null) {
    const bar = document.createElement("span");
    const full = document.createElement("span");
    bar.className = "bar";
    full.style.width = `${100 * share}%`;
    bar.append(full);
    cell.append(bar);
  }
  if (numbers) cell.prepend(plotted(numbers));
}

// --- what a reader does

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  ask();
});
byId("filter").addEventListener("input", () => shown && show(shown));
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (!paused) {
    ask();
    return;
  }
  clearTimeout(timer);
  if (answeredAt && !document.body.classList.contains("trouble")) sayState();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) ask();
});
addEventListener("hashchange", () => {
  key = location.hash.slice(1);
  ask();
});
ask();
