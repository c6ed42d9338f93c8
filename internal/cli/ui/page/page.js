// The page of "hasp ui". It asks the server for one list of the store after another.
// Texts of the store are only ever set as textContent or as an attribute, never as markup.

const $ = (id) => document.getElementById(id);
const known = new Map(); // rows of the server, by ID
const lines = new Map(); // lines of the table, by ID
const SVG = "http://www.w3.org/2000/svg";
const STEP = 200; // lines that are shown at first, and added by a click

let store = { name: "", prefix: "", ordered: false };
let status = null; // of the last message
let skew = 0; // the server's clock minus ours, in ms
let cut = false; // the connection to hasp ui is broken
let sort = { by: "key", down: false };
let most = STEP;
let chosen = null; // the ID of the key whose detail is shown
let detail = null;

const now = () => Date.now() + skew;

// element returns a new element with a text.
function element(name, text = "", attributes = {}, space = "http://www.w3.org/1999/xhtml") {
  const e = document.createElementNS(space, name);
  e.textContent = text;
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  return e;
}

// set changes a text only if it differs, so that a screen reader does not repeat it.
function set(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

function seconds(ms) {
  const s = Math.max(ms, 0) / 1000;
  if (s < 10) return s.toFixed(1) + "s";
  const t = Math.round(s);
  if (t < 60) return t + "s";
  if (t < 3600) return Math.floor(t / 60) + "m" + (t % 60) + "s";
  if (t < 86400) return Math.floor(t / 3600) + "h" + Math.floor((t % 3600) / 60) + "m";
  return Math.floor(t / 86400) + "d" + Math.floor((t % 86400) / 3600) + "h";
}

const clock = (ms) => new Date(ms - skew).toLocaleTimeString([], { hour12: false });
const keys = (n) => (n === 1 ? "1 key" : n.toLocaleString("en") + " keys");
const named = (owner) => owner || "(no owner)";

// The lists.

// follow asks for one list after another. The server answers when it has a list that this page does
// not have. So there is no timer here, which a browser would slow down for a page in the background.
async function follow() {
  for (let has = 0; ; ) {
    try {
      const answer = await fetch("locks?has=" + has);
      // A browser that is refused may need a token again: hasp ui may have been started again.
      if (!answer.ok) setTimeout(() => location.reload(), 5000);
      const m = await answer.json();
      has = m.number;
      skew = m.now - Date.now();
      cut = false;
      status = m.status;
      store = m.store;
      known.clear();
      for (const r of m.rows) known.set(r.id, r);
      draw();
      if (chosen) fetchDetail();
    } catch {
      cut = true;
      drawStatus();
      await new Promise((wake) => setTimeout(wake, 1000));
    }
  }
}

function drawStatus() {
  const s = $("status");
  let text = "connecting";
  let kind = "";
  if (cut) {
    [text, kind] = ["not connected to hasp ui; what is shown is old", "bad"];
  } else if (status?.error) {
    [text, kind] = ["outage since " + clock(status.since) + ": " + status.error, "bad"];
  } else if (status?.listed) {
    [text, kind] = ["live", "good"];
  } else if (status) {
    text = "reading the first list";
  }
  set(s, text);
  s.className = kind;
  document.body.classList.toggle("stale", kind === "bad");
  if (!status) return;
  set($("store"), store.name + (store.prefix ? ", keys that begin with " + store.prefix : ""));
  document.title = (kind === "bad" ? "⚠ " : "") + keys(status.keys) + " – hasp " + store.name;
  let pace = "";
  if (status.took >= 1000) pace = "A list takes " + seconds(status.took) + ". The next one begins " + seconds(status.rest) + " later.";
  if (status.more) pace += " " + keys(status.more) + " more are left out: begin hasp ui with a prefix.";
  set($("pace"), pace);
}

// The table.

const text = {
  key: (r) => r.key,
  owner: (r) => {
    if (!r.held) return "(free)";
    if (r.shared) return "(" + r.shared + " shared) " + r.owner + (r.shared > 1 ? ", …" : "");
    return r.foreign && !r.owner ? "(not of this strategy)" : named(r.owner) + (r.kept ? " (min hold)" : "");
  },
  age: (r) => (!r.held ? "–" : r.since ? seconds(now() - r.since) : "≥ " + seconds(now() - r.seen)),
  left: (r) => (!r.held ? "–" : !r.until ? "no end" : seconds(r.until - now()) + (r.late ? ", not renewed" : "")),
  fence: (r) => r.fence || "–",
  waiting: (r) => (r.waiting ? String(r.waiting) : "–"),
};
const columns = Object.keys(text);

const byText = new Intl.Collator("en", { numeric: true }).compare;
const compare = {
  key: (a, b) => byText(a.key, b.key),
  owner: (a, b) => byText(text.owner(a), text.owner(b)),
  age: (a, b) => (b.since || b.seen || Infinity) - (a.since || a.seen || Infinity) || 0,
  left: (a, b) => (a.until || Infinity) - (b.until || Infinity) || 0,
  fence: (a, b) => (a.fence ?? "").length - (b.fence ?? "").length || byText(a.fence ?? "", b.fence ?? ""),
  waiting: (a, b) => (a.waiting ?? 0) - (b.waiting ?? 0),
};

function draw() {
  drawStatus();
  const wanted = $("filter").value.toLowerCase();
  const waited = $("waited").checked;
  const rows = [];
  for (const r of known.values()) {
    if (waited && !r.waiting) continue;
    if (wanted && !r.key.toLowerCase().includes(wanted) && !(r.owner ?? "").toLowerCase().includes(wanted)) continue;
    rows.push(r);
  }
  rows.sort((a, b) => (sort.down ? -1 : 1) * compare[sort.by](a, b) || compare.key(a, b) || (a.id < b.id ? -1 : 1));
  const visible = rows.slice(0, most);

  // Lines are kept, so that a focus or a selection stays where it is.
  const focus = document.activeElement;
  const body = $("rows");
  const kept = new Set();
  visible.forEach((r, i) => {
    kept.add(r.id);
    const line = lines.get(r.id) ?? newLine(r);
    fill(line, r);
    if (body.children[i] !== line) body.insertBefore(line, body.children[i] ?? null);
  });
  for (const [id, line] of lines) {
    if (kept.has(id)) continue;
    line.remove();
    lines.delete(id);
  }
  if (focus && focus !== document.activeElement && focus.isConnected) focus.focus({ preventScroll: true });

  set($("count"), rows.length === known.size ? keys(rows.length) : rows.length.toLocaleString("en") + " of " + keys(known.size));
  $("further").hidden = rows.length <= most;
  set($("further"), "Show " + Math.min(STEP, rows.length - most) + " more of " + keys(rows.length));
  $("empty").hidden = !status?.listed || rows.length > 0;
  set($("empty"), known.size ? "No key matches the filter." : "No key is held.");
}

function newLine(r) {
  const line = element("tr");
  const head = element("th", "", { scope: "row" });
  const button = element("button", "", { type: "button" });
  button.append(element("bdi", r.key));
  head.append(button);
  line.addEventListener("click", (e) => {
    // If the user has selected text, to copy it, the click chooses no key.
    if (e.target.closest("button") || getSelection().isCollapsed) choose(r.id);
  });
  line.append(head);
  for (const c of columns.slice(1)) line.append(element("td", "", c === "owner" ? {} : { class: "number" }));
  line.children[1].append(element("bdi"));
  lines.set(r.id, line);
  return line;
}

function fill(line, r) {
  line.classList.toggle("chosen", r.id === chosen);
  line.ariaCurrent = r.id === chosen ? "true" : null;
  columns.forEach((c, i) => {
    if (c === "key") return;
    const cell = line.children[i];
    const s = text[c](r);
    set(c === "owner" ? cell.firstChild : cell, s);
    if (c === "left") cell.classList.toggle("late", Boolean(r.late));
  });
}

// Update the times between two messages.
setInterval(() => {
  if (document.hidden) return;
  if (!cut && !status?.error) lines.forEach((line, id) => fill(line, known.get(id)));
  if (detail) drawTimeline();
}, 500);

const sorters = document.querySelectorAll("button[data-sort]");
for (const button of sorters) {
  button.addEventListener("click", () => {
    const by = button.dataset.sort;
    // For ages and waiters, the first click shows the largest first.
    sort = { by, down: sort.by === by ? !sort.down : by === "age" || by === "waiting" };
    for (const b of sorters) b.closest("th").ariaSort = null;
    button.closest("th").ariaSort = sort.down ? "descending" : "ascending";
    draw();
  });
}
$("filters").addEventListener("submit", (e) => e.preventDefault());
for (const id of ["filter", "waited"]) {
  $(id).addEventListener("input", () => {
    most = STEP;
    draw();
  });
}
$("further").addEventListener("click", () => {
  most += STEP;
  draw();
});

// The detail of a key.

function choose(id) {
  chosen = id;
  history.replaceState(null, "", "#" + id);
  detail = null;
  draw();
  fetchDetail().then(() => $("detail-key").focus());
}

function close() {
  const button = lines.get(chosen)?.querySelector("button");
  chosen = detail = null;
  history.replaceState(null, "", location.pathname);
  $("detail").hidden = true;
  draw();
  button?.focus();
}
$("close").addEventListener("click", close);
$("window").addEventListener("change", drawTimeline);

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === "Escape" && chosen) close();
  if (e.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "")) {
    e.preventDefault();
    $("filter").focus();
  }
});

let fetching = false;
async function fetchDetail() {
  const id = chosen;
  if (fetching && detail) return; // the next message asks again
  fetching = true;
  try {
    const answer = await fetch("key?id=" + encodeURIComponent(id));
    if (!answer.ok || id !== chosen) return;
    const d = await answer.json();
    if (id !== chosen) return;
    detail = d;
    drawDetail();
  } catch {
    // follow reports that the connection is broken.
  } finally {
    fetching = false;
  }
}

function drawDetail() {
  const d = detail;
  const r = d.row;
  $("detail").hidden = false;
  set($("detail-key"), d.key);
  let state = "free";
  if (r?.held) {
    state = r.shared ? "shared by " + d.shared.map(named).join(", ") : "held by " + text.owner(r);
    if (r.since) state += ", since " + clock(r.since);
    if (r.late) state += ". The holder does not renew. The key stays locked until the term ends.";
  } else if (r) {
    state = "free, and waited for";
  }
  if (r?.fence) state += " (fence " + r.fence + ")";
  set($("detail-state"), state);

  $("queue-part").hidden = !r?.waiting;
  if (r?.waiting) {
    set($("queue-title"), store.ordered ? "Queue, in order" : "Callers that wait");
    list($("queue"), d.waiters.map((w) => [named(w)]));
    if (r.waiting > d.waiters.length) $("queue").append(element("li", "and " + (r.waiting - d.waiters.length) + " more"));
  }
  drawTimeline();
  drawStory();
}

// list shows items, each of which has a text and perhaps a time before it.
function list(e, items) {
  const shown = items.map(([s, at]) => (at ? clock(at) + " " : "") + s).join("\n");
  if (e.dataset.shown === shown) return; // leave a selection alone
  e.dataset.shown = shown;
  e.replaceChildren(
    ...items.map(([s, at]) => {
      const li = element("li");
      if (at) li.append(element("time", clock(at), { datetime: new Date(at).toISOString() }));
      li.append(element("bdi", s));
      return li;
    }),
  );
}

const endings = {
  released: "releases the key after ",
  expired: "lost the key: it did not renew, and the term ended after ",
  ended: "no longer has the key, after ",
  got: "gets the key after waiting ",
  left: "gives up after waiting ",
};

// drawStory lists what happened, the latest first. The third value of an item sorts items of the
// same time: a hold ends before the next one begins.
function drawStory() {
  const items = [];
  for (const lane of detail.lanes) {
    for (const s of lane.spans) {
      const waits = s.state === "waits";
      if (waits) items.push([named(lane.owner) + " waits", s.from, 1]);
      else if (!lane.spans.some((w) => w.how === "got" && w.to === s.from)) {
        items.push([named(lane.owner) + (s.state === "shares" ? " shares the key" : " holds the key"), s.from, 2]);
      }
      if (s.to) items.push([named(lane.owner) + " " + endings[s.how] + seconds(s.to - s.from), s.to, waits ? 2 : s.to > s.from ? 0 : 3]);
    }
  }
  for (const g of detail.gaps) {
    items.push([g.why === "outage" ? "outage: nothing is known until it is over" : "nobody watched", g.from, 4]);
    if (g.to) items.push(["known again", g.to, -1]);
  }
  items.sort((a, b) => b[1] - a[1] || b[2] - a[2]);
  list($("story"), items.slice(0, 100));
}

// The timeline.

const TOP = 22, LANE = 26;

// shape returns a new shape with a text. A mouse over the shape shows the tip.
function shape(name, attributes, tip, text) {
  const e = element(name, text, attributes, SVG);
  if (tip) e.prepend(element("title", tip, {}, SVG));
  return e;
}

function drawTimeline() {
  if (!detail) return;
  const WIDTH = Math.max($("timeline").parentElement.clientWidth, 320);
  const LEFT = Math.min(260, WIDTH / 3);
  const fits = Math.floor(LEFT / 7.6); // characters before the lines
  const span = Number($("window").value) * 1000;
  const end = cut || status?.error ? Math.max(detail.now, detail.listed) : now();
  const begin = end - span;
  const x = (t) => LEFT + ((WIDTH - LEFT - 10) * (Math.min(Math.max(t, begin), end) - begin)) / span;
  const lanes = detail.lanes.filter((l) => l.spans.some((s) => !s.to || s.to > begin)).slice(-64);
  const bottom = TOP + Math.max(lanes.length, 1) * LANE;

  const hatch = shape("pattern", { id: "dead", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(shape("rect", { class: "dead", width: 2.5, height: 7 }));
  const parts = [hatch];
  const bar = (from, to, attributes, tip) => parts.push(shape("rect", { x: x(from), width: Math.max(x(to) - x(from), 0.8), ...attributes }, tip));
  for (const g of detail.gaps) {
    const to = g.to || end;
    if (to > begin) bar(g.from, to, { class: "gap", y: TOP, height: bottom - TOP }, g.why);
  }
  for (let i = 0; i <= 6; i++) {
    const t = begin + (span * i) / 6;
    parts.push(shape("line", { class: "rule", x1: x(t), x2: x(t), y1: TOP, y2: bottom }));
    parts.push(shape("text", { class: "tick", x: x(t) - (i === 6 ? 6 : 0), y: 14 }, "", i === 6 ? "now" : "–" + seconds(end - t)));
  }
  detail.lanes.forEach((lane, colour) => {
    const row = lanes.indexOf(lane);
    if (row < 0) return;
    const y = TOP + row * LANE + LANE / 2;
    const owner = named(lane.owner);
    const short = owner.length > fits ? owner.slice(0, fits - 12) + "…" + owner.slice(-11) : owner;
    parts.push(shape("text", { x: 4, y: y + 4 }, owner, short));
    for (const s of lane.spans) {
      const to = s.to || end;
      if (to <= begin) continue;
      const took = seconds(to - s.from);
      if (s.state === "waits") {
        bar(s.from, to, { class: "waits", y: y - 1, height: 2 }, owner + " waits: " + took + (s.how === "left" ? ", then gives up" : ""));
        continue;
      }
      const late = s.late ? Math.min(s.late, to) : to;
      bar(s.from, late, { class: "holds c" + (colour % 8), y: y - 8, height: 16, rx: 1.5 }, owner + (s.to ? " held: " : " holds: ") + took);
      if (late < to) bar(late, to, { class: "lost", fill: "url(#dead)", y: y - 8, height: 16 }, owner + " does not renew");
    }
  });
  if (!lanes.length) parts.push(shape("text", { x: LEFT + 10, y: TOP + LANE / 2 + 4 }, "", "nothing seen in this time"));

  const svg = $("timeline");
  svg.setAttribute("viewBox", "0 0 " + WIDTH + " " + (bottom + 6));
  svg.setAttribute("aria-label", "Timeline of " + lanes.length + (lanes.length === 1 ? " owner" : " owners") + "; the list below has the same as text");
  svg.replaceChildren(...parts);
}

// The address may name a key.
if (/^#[\w-]+$/.test(location.hash)) choose(location.hash.slice(1));

// Colours.

const theme = $("theme");
const paint = () => (document.documentElement.dataset.theme = theme.value);
theme.addEventListener("change", () => {
  localStorage.setItem("hasp-theme", theme.value);
  paint();
});
theme.value = localStorage.getItem("hasp-theme") ?? "";
paint();

follow();
