// The script of all pages. Text from jobs is only set as text; the server escapes the pieces of HTML that it sends.
"use strict";
const $ = (id) => document.getElementById(id);
const MOST_LINES = 5000;

// -- times ------------------------------------------------------------------------------------------------------------

function duration(s) {
  s = Math.max(0, s);
  if (s < 10) return s.toFixed(1) + "s";
  s = Math.floor(s);
  if (s < 120) return s + "s";
  if (s < 7200) return Math.floor(s / 60) + "m" + String(s % 60).padStart(2, "0") + "s";
  if (s < 172800) return Math.floor(s / 3600) + "h" + String(Math.floor(s / 60) % 60).padStart(2, "0") + "m";
  return Math.floor(s / 86400) + "d";
}
function setText(element, text) { if (element.textContent !== text) element.textContent = text; }
function tick() {
  const now = Date.now() / 1000;
  for (const time of document.querySelectorAll("time[data-since]"))
    setText(time, duration((time.dataset.until ? +time.dataset.until : Math.floor(now)) - (time.dataset.until ? +time.dataset.since : Math.floor(+time.dataset.since))));
  for (const time of document.querySelectorAll("time[data-at]:empty")) {
    const at = new Date(+time.dataset.at * 1000);
    time.textContent = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
    time.title = at.toISOString();
  }
}

// -- messages of the server -------------------------------------------------------------------------------------------

let stream = null, hasEnded = false, lostTimer = 0;
const LOST = "The dashboard does not answer, so this page may be out of date. If it was stopped, start it again with `kinetic dashboard`.";
const listeners = [];
function showNotice(words) {
  const notice = $("notice");
  notice.textContent = words;
  notice.hidden = false;
  clearTimeout(showNotice.timer);
  showNotice.timer = setTimeout(() => { notice.hidden = true; }, 6000);
}
function showTrouble(words) {
  $("trouble").hidden = !words;
  setText($("trouble"), words || "");
}
function showLink(state, words) {
  $("link").className = "link " + state;
  setText($("link"), words);
}
function replace(id, html) {
  const element = $(id);
  if (!element) return location.reload();
  const fresh = document.createElement("template"), focused = element.contains(document.activeElement) && document.activeElement.id;
  fresh.innerHTML = html;
  renew(element, fresh.content);
  if (focused && $(focused)) $(focused).focus({ preventScroll: true });
}
// Replace the children of an element by those of `fresh`. Equal nodes stay, so that focus and selection are not lost.
function renew(element, fresh) {
  const before = [...element.childNodes], after = [...fresh.childNodes];
  after.forEach((node, n) => {
    const old = before[n];
    if (!old) element.append(node);
    else if (old.nodeName !== node.nodeName || old.id !== node.id) old.replaceWith(node);
    else if (!node.attributes) { if (old.data !== node.data) old.data = node.data; }
    else {
      const same = old.dataset.at === node.dataset.at;
      for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
      for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      if (!same || !old.matches("time")) renew(old, node); // tick() has written the text of unchanged times
    }
  });
  for (const old of before.slice(after.length)) old.remove();
}
function receive(message) {
  for (const [id, html] of Object.entries(message.html || {})) replace(id, html);
  if ("trouble" in message) showTrouble(message.trouble);
  for (const listen of listeners) listen(message);
  tick();
  if (message.end) { hasEnded = true; disconnect(); showLink("lost", "ended"); }
}
function address() {
  const live = document.body.dataset.live, host = $("output") ? chosenHost() : 0;
  return host ? `${live}?host=${host}` : live;
}
function connect() {
  if (stream || hasEnded || !document.body.dataset.live || document.hidden) return;
  const mine = stream = new EventSource(new URL(address(), document.baseURI));
  mine.onopen = () => { if (stream === mine) { clearLost(); showLink("live", "live"); for (const listen of listeners) listen({ opened: true }); } };
  mine.onmessage = (event) => { if (stream === mine) receive(JSON.parse(event.data)); };
  mine.onerror = () => {
    if (stream !== mine) return;
    showLink("lost", "not connected");
    lostTimer = lostTimer || setTimeout(() => showTrouble(LOST), 5000);
    if (mine.readyState === EventSource.CLOSED) { stream = null; setTimeout(connect, 2000); }
  };
}
function clearLost() {
  clearTimeout(lostTimer);
  if (lostTimer) showTrouble("");
  lostTimer = 0;
}
function disconnect() {
  if (stream) stream.close();
  stream = null;
}
function reconnect() { disconnect(); connect(); }
// A browser opens at most six connections to one address: only visible pages hold one.
document.addEventListener("visibilitychange", () => document.hidden ? disconnect() : connect());

async function ask(url, options) {
  const response = await fetch(new URL(url, document.baseURI), options);
  const isJson = (response.headers.get("content-type") || "").includes("json");
  const body = isJson ? await response.json() : await response.text();
  if (!response.ok) throw new Error(body.error || "The dashboard was stopped. Start it again with `kinetic dashboard`.");
  return body;
}

// -- buttons ----------------------------------------------------------------------------------------------------------

let answer = null; // resolves the open question
$("ask").addEventListener("close", () => { // this event comes late: another question may be open by now
  if (!$("ask").open && answer) answer($("ask").returnValue === "yes");
});
function askToConfirm(words, yes) {
  const dialog = $("ask");
  if (answer) answer(false);
  setText($("ask-words"), words);
  setText($("ask-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => { answer = (is) => { answer = null; done(is); }; });
}
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-act]");
  if (button) {
    const { act, ask: words, yes } = button.dataset;
    if (!await askToConfirm(words, yes)) return;
    try { showNotice((await ask(act, { method: "POST" })).notice); } catch (error) { showNotice(error.message); }
  }
  const host = event.target.closest("[data-host]");
  if (host && $("host")) { $("host").value = host.dataset.host; chooseHost(); $("output").scrollIntoView({ block: "nearest" }); }
});
async function load(element) {
  const into = element.querySelector(".loaded");
  into.textContent = "…";
  try {
    const body = await ask(element.dataset.load, { method: element.dataset.post ? "POST" : "GET" });
    if (typeof body === "string") into.innerHTML = body; else into.textContent = body.text;
  } catch (error) { into.textContent = error.message; }
  tick();
}
for (const details of document.querySelectorAll("details[data-load]")) details.addEventListener("toggle", () => { if (details.open) load(details); });
for (const element of document.querySelectorAll(".now[data-load]")) load(element);

// -- the list of jobs: only rows in view are in the page -------------------------------------------------------------------

function listJobs() {
  const rows = $("rows"), filter = $("filter"), parameters = new URLSearchParams(location.search);
  let state = parameters.get("state") || "", total = +$("jobs").dataset.total, busy = false, isStale = false, html = "";
  filter.value = parameters.get("q") || "";
  let isPart = !!(state || filter.value); // whether the rows in the page are filtered
  const height = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
  function lay() {
    rows.classList.add("windowed");
    rows.style.height = total * height() + "px";
    for (const row of rows.children) row.style.transform = `translateY(${+row.dataset.n * height()}px)`;
    setText($("total"), isPart ? `${total.toLocaleString()} shown` : "");
    $("none").hidden = total > 0;
    for (const chip of document.querySelectorAll("[data-state]")) chip.setAttribute("aria-pressed", chip.dataset.state === state);
  }
  async function show() {
    if (busy) { isStale = true; return; }
    busy = true;
    const q = filter.value, wanted = state;
    const above = Math.max(0, -rows.getBoundingClientRect().top), n = Math.ceil(innerHeight / height()) + 20;
    const from = Math.max(0, Math.floor(above / height()) - 10);
    try {
      const part = await ask("rows?" + new URLSearchParams({ from, n, state, q }));
      if (q === filter.value && wanted === state) apply(part, from);
    } catch (error) { showTrouble(error.message); }
    busy = false;
    if (isStale) { isStale = false; show(); }
  }
  function apply(part, from) {
    total = part.total;
    isPart = !!(state || filter.value);
    if (part.html !== html) { replace("rows", html = part.html); rows.dataset.from = from; }
    lay();
    tick();
  }
  function refilter() {
    const query = new URLSearchParams();
    if (state) query.set("state", state);
    if (filter.value) query.set("q", filter.value);
    history.replaceState(null, "", location.pathname + (query.size ? "?" + query : ""));
    scrollTo({ top: 0 });
    show();
  }
  listeners.push((message) => { if (message.changed) { lay(); show(); } });
  addEventListener("scroll", show, { passive: true });
  addEventListener("resize", show);
  filter.addEventListener("input", refilter);
  document.addEventListener("click", (event) => {
    const chip = event.target.closest("[data-state]");
    if (chip) { state = chip.dataset.state === state ? "" : chip.dataset.state; refilter(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    if (!step || (event.key.startsWith("Arrow") && !rows.contains(document.activeElement))) return;
    const now = rows.contains(document.activeElement) ? +document.activeElement.dataset.n + step : +(rows.dataset.from || 0) + 0;
    const next = [...rows.children].find((row) => +row.dataset.n === now) || rows.children[0];
    if (next) { event.preventDefault(); next.focus({ preventScroll: true }); next.scrollIntoView({ block: "nearest" }); }
  });
  lay();
}

// -- the output of a host ----------------------------------------------------------------------------------------------

function chosenHost() { return $("host") ? Math.max(0, Math.min(+$("host").value || 0, +$("host").max)) : 0; }
function chooseHost() {
  $("host").value = chosenHost();
  figures.clear();
  $("groups").replaceChildren();
  $("download").href = `jobs/${$("output").dataset.job}/output?host=${chosenHost()}`;
  markHost();
  reconnect();
  if ($("search").value) searchOutput();
}
function markHost() {
  for (const element of document.querySelectorAll("[data-host]")) {
    const isChosen = +element.dataset.host === chosenHost();
    element.setAttribute("aria-pressed", isChosen);
    if (element.matches(".square")) element.tabIndex = isChosen ? 0 : -1; // Arrows, not Tab, move through a thousand squares.
  }
}
function moveAmongSquares(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step || !event.target.matches(".square")) return;
  const all = [...document.querySelectorAll(".square")], next = all[all.indexOf(event.target) + step];
  event.preventDefault();
  if (next) next.focus();
}
// Colours of a terminal: codes such as "1;31" change a style, which lasts until the next code.
const CODES = /\x1b\[([\d;]*)m/;
function restyle(style, codes) {
  const numbers = codes.split(";").map(Number);
  let { colour, bold } = style;
  while (numbers.length) {
    const code = numbers.shift();
    if (code === 0) colour = bold = "";
    else if (code === 1) bold = "bold";
    else if (code === 22) bold = "";
    else if (code === 39) colour = "";
    else if ((code >= 30 && code < 38) || (code >= 90 && code < 98)) colour = "ansi-" + code % 10;
    else if (code === 38 || code === 48) { // 256 or true colours: only the first 16 are readable on both backgrounds
      const [kind, number] = numbers.splice(0, numbers[0] === 5 ? 2 : 4);
      if (code === 38) colour = kind === 5 && number < 16 ? "ansi-" + number % 8 : "";
    }
  }
  return { colour, bold };
}
function makeLine([host, attempt, at, isError, painted], { named, mark, style = {} } = {}) {
  const line = document.createElement("div");
  if (isError) line.className = "err";
  if (named) {
    const who = document.createElement("span");
    who.className = "who";
    who.textContent = `[host ${host}] `;
    line.append(who);
  }
  if (at) line.title = `${new Date(at * 1000).toLocaleString()} · attempt ${attempt}`;
  const parts = painted.split(CODES), words = parts.filter((_, n) => n % 2 === 0).join("");
  const where = mark ? words.toLowerCase().indexOf(mark.toLowerCase()) : -1;
  if (where >= 0) {
    const hit = document.createElement("mark");
    hit.textContent = words.slice(where, where + mark.length);
    line.append(words.slice(0, where), hit, words.slice(where + mark.length));
    return line;
  }
  parts.forEach((part, n) => {
    if (n % 2) return Object.assign(style, restyle(style, part));
    const name = [style.colour, style.bold].filter(Boolean).join(" ");
    const piece = name ? document.createElement("span") : null;
    if (piece) { piece.className = name; piece.textContent = part; }
    if (part) line.append(piece || part);
  });
  return line;
}
function showOutput() {
  const lines = $("lines"), newest = $("newest");
  let open = null, attempt = 0, follows = true, top = 0, style = {};
  const atEnd = () => lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
  const follow = () => { if (follows) lines.scrollTop = lines.scrollHeight; };
  lines.addEventListener("scroll", () => { // Only scrolling up stops following: rewrapped lines move the end, too.
    follows = atEnd() || (follows && lines.scrollTop >= top);
    top = lines.scrollTop;
    newest.hidden = follows || lines.hidden;
  }, { passive: true });
  newest.addEventListener("click", () => { follows = true; follow(); });
  new ResizeObserver(follow).observe(lines);
  listeners.push((message) => {
    if (message.opened) { lines.replaceChildren(); open = null; attempt = 0; follows = true; style = {}; markHost(); }
    if (message.html) markHost();
    if (!message.lines) return;
    const added = document.createDocumentFragment();
    for (const line of message.lines) {
      if (attempt && line[1] !== attempt) {
        const mark = makeLine([0, 0, 0, 0, `attempt ${line[1]}`]);
        mark.className = "mark";
        added.append(mark);
      }
      attempt = line[1];
      added.append(makeLine(line, { style }));
    }
    if (open) open.remove();
    open = message.open ? makeLine([0, 0, 0, 0, message.open], { style: { ...style } }) : null;
    if (open) added.append(open);
    lines.append(added);
    while (lines.childElementCount > MOST_LINES) lines.firstChild.remove();
    follow();
  });
  let timer = 0;
  const soon = () => { clearTimeout(timer); timer = setTimeout(searchOutput, 200); };
  $("search").addEventListener("input", soon);
  if ($("everywhere")) $("everywhere").addEventListener("change", soon);
  if ($("host")) $("host").addEventListener("change", chooseHost);
}
async function searchOutput() {
  if (searchOutput.last) searchOutput.last.abort();
  const words = $("search").value, matches = $("matches"), mine = searchOutput.last = new AbortController();
  matches.hidden = !words;
  $("lines").hidden = !!words;
  setText($("hits"), words ? "Searching…" : "");
  if (!words) { $("lines").scrollTop = $("lines").scrollHeight; return; }
  const all = $("everywhere") && $("everywhere").checked;
  try {
    const result = await ask(`jobs/${$("output").dataset.job}/search?` + new URLSearchParams({ q: words, host: all ? "all" : chosenHost() }), { signal: mine.signal });
    if (searchOutput.last !== mine) return;
    matches.replaceChildren(...result.lines.map((line) => makeLine(line, { named: all, mark: words })));
    const n = result.lines.length;
    setText($("hits"), `${n}${result.cut && n ? " or more" : ""} ${n === 1 ? "line" : "lines"} in ${result.cut ? "the first " : ""}${result.size}`);
  } catch (error) { if (searchOutput.last === mine) setText($("hits"), error.message); }
}

// -- charts -----------------------------------------------------------------------------------------------------------

const figures = new Map(); // by name of the metric
function showCharts() {
  const find = $("find-chart"), groups = $("groups");
  function add(name) {
    const [prefix, rest] = name.split("/", 2), title = rest === undefined ? "general" : prefix;
    let group = [...groups.children].find((element) => element.dataset.title === title);
    if (!group) {
      group = document.createElement("details");
      group.innerHTML = '<summary></summary><div class="charts"></div>';
      group.dataset.title = group.firstChild.textContent = title;
      group.open = true;
      groups.append(group);
    }
    const figure = document.createElement("figure");
    figure.className = "chart";
    group.lastChild.append(figure);
    figures.set(name, figure);
    return figure;
  }
  function filter() {
    const wanted = find.value.toLowerCase();
    for (const [name, figure] of figures) figure.hidden = !name.toLowerCase().includes(wanted);
    for (const group of groups.children) {
      group.hidden = !group.querySelector("figure:not([hidden])");
      if (wanted) group.open = true;
    }
  }
  find.addEventListener("input", filter);
  listeners.push((message) => {
    if (!message.charts) return;
    for (const [name, html, points] of message.charts) {
      const figure = figures.get(name) || add(name), fresh = document.createElement("template");
      fresh.innerHTML = html;
      renew(figure, fresh.content);
      figure.points = points;
    }
    $("charts").hidden = false;
    filter();
    point();
  });
}

let pointer = null; // kept, because the chart under it may change
document.addEventListener("pointermove", (event) => { pointer = event; point(); });
function point() {
  const under = pointer && document.elementFromPoint(pointer.clientX, pointer.clientY), svg = under && under.closest(".chart svg");
  for (const needle of document.querySelectorAll(".needle")) if (needle.parentNode !== svg) {
    needle.closest(".chart").querySelector(".at").textContent = "";
    needle.remove();
  }
  if (!svg) return;
  const { points } = svg.parentNode, box = svg.getBoundingClientRect();
  if (!points.length) return;
  const x = (pointer.clientX - box.left) / box.width * 320;
  const nearest = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  let needle = svg.querySelector(".needle");
  if (!needle) {
    needle = document.createElementNS("http://www.w3.org/2000/svg", "line");
    needle.setAttribute("class", "needle");
    svg.append(needle);
  }
  for (const [name, value] of [["x1", nearest[0]], ["x2", nearest[0]], ["y1", 0], ["y2", 96]]) needle.setAttribute(name, value);
  setText(svg.parentNode.querySelector(".at"), nearest[1]);
}

// -- keys -------------------------------------------------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input") ) {
    if (event.key === "Escape") { event.target.value = ""; event.target.dispatchEvent(new Event("input")); event.target.blur(); }
    return;
  }
  moveAmongSquares(event);
  const box = $("filter") || $("search");
  if (event.key === "/" && box && !event.ctrlKey && !event.metaKey) { event.preventDefault(); box.focus(); }
});

if ($("jobs")) listJobs();
if ($("output")) { showOutput(); showCharts(); }
tick();
setInterval(tick, 1000);
connect();
