// The status page. Asks /status.json once a second while it is seen, and
// /history.json every two; what it shows is set as text, never as HTML.
"use strict";

const EVERY_MS = 1000;
const HISTORY_EVERY = 2; // turns
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100; // of a chart, in its own units
let before = null;
let answeredAt = Date.now();
let numTurns = 0;

const element = (id) => document.getElementById(id);
const show = (id, text) => { element(id).textContent = text; };
const percent = (part) => `${Math.round(100 * part)}%`;
const few = (part) => (part > 0 && part < 0.1 ? `${(100 * part).toFixed(1)}%` : percent(part));
const count = (number) => Math.round(number).toLocaleString("en");
const short = (number) => (number >= 1e6 ? `${+(number / 1e6).toFixed(1)}M` : number >= 1e4 ? `${+(number / 1e3).toFixed(1)}k` : number < 10 ? String(+number.toFixed(1)) : count(number));

const CHARTS = [
  { id: "tokens", name: "tokens/s", pick: "tokens_per_s", text: short, least: 1 },
  { id: "running", name: "running", pick: "num_running", text: short, least: 2 },
  { id: "waiting", name: "waiting", pick: "num_waiting", text: short, least: 2 },
  { id: "kv", name: "KV blocks reserved", pick: "kv_used", text: few, least: 0.01, most: 1 },
];

function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s >= 1) return `${s.toFixed(1)} s`;
  return s >= 0.01 ? `${Math.round(s * 1000)} ms` : `${(s * 1000).toFixed(1)} ms`;
}

// "21 / 22 ms" where both have one unit.
function pair(values) {
  const [low, high] = values.map(seconds);
  const [lowUnit, highUnit] = [low.split(" ")[1], high.split(" ")[1]];
  return lowUnit === highUnit && lowUnit ? `${low.split(" ")[0]} / ${high}` : `${low} / ${high}`;
}

function duration(s) {
  const [days, hours, minutes] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.floor(s)} s`;
}

function key() {
  return sessionStorage.getItem("key");
}

async function ask(path) {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  element("ask-key").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "a key is needed" : `status ${answer.status}`);
  return answer.json();
}

// The least of 1, 2, 3, 4, 6, 8, 10, 20, … that a scale may end with.
function scaleEnd(most, least) {
  const wanted = Math.max(most, least);
  const power = 10 ** Math.floor(Math.log10(wanted) + 1e-9);
  for (const digit of [1, 2, 3, 4, 6, 8, 10]) if (digit * power >= wanted * (1 - 1e-9)) return digit * power;
  return wanted;
}

function make(parent, name, kind) {
  const child = parent.appendChild(document.createElement(name));
  child.className = kind || "";
  return child;
}

function makePath(svg, kind, d) {
  const path = svg.appendChild(document.createElementNS(SVG, "path"));
  path.setAttribute("class", kind);
  path.setAttribute("d", d);
  return path;
}

// Once; later only texts and two paths change.
function makeChart(chart) {
  const figure = make(element("charts"), "figure");
  const caption = make(figure, "figcaption");
  make(caption, "span").textContent = chart.name;
  chart.now = make(caption, "b");
  const box = make(figure, "div", "chart");
  const svg = box.appendChild(document.createElementNS(SVG, "svg"));
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("id", `chart-${chart.id}`);
  chart.svg = svg;
  const scale = make(box, "div", "scale");
  chart.marks = [make(scale, "span"), make(scale, "span"), make(scale, "span")];
  const times = make(box, "div", "times");
  chart.times = [make(times, "span"), make(times, "span"), make(times, "span")];
}

// Points of a line: pieces between gaps.
function pieces(values, kept, end) {
  const found = [];
  let piece = [];
  const first = kept - values.length;
  values.forEach((value, place) => {
    if (value === null) {
      if (piece.length) found.push(piece);
      piece = [];
    } else piece.push([first + place + 1, +(HEIGHT * (1 - value / end)).toFixed(2)]);
  });
  if (piece.length) found.push(piece);
  return found;
}

function draw(chart, history) {
  if (!chart.svg) makeChart(chart);
  const values = history[chart.pick];
  const known = values.filter((value) => value !== null);
  const end = Math.min(chart.most || Infinity, scaleEnd(Math.max(0, ...known), chart.least));
  const spanMin = (history.kept * history.every_s) / 60;
  chart.marks.forEach((mark, place) => { mark.textContent = chart.text((end * (2 - place)) / 2); });
  chart.times.forEach((time, place) => { time.textContent = place === 2 ? "now" : `−${spanMin - (place * spanMin) / 2} min`; });
  const last = values.length ? values[values.length - 1] : null;
  chart.now.textContent = last === null ? "–" : chart.text(last);
  const svg = chart.svg;
  svg.setAttribute("viewBox", `0 0 ${history.kept} ${HEIGHT}`);
  svg.setAttribute("aria-label", `${chart.name} over ${spanMin} minutes, at most ${chart.text(Math.max(0, ...known))}`);
  svg.replaceChildren();
  for (const y of [0, HEIGHT / 2, HEIGHT]) makePath(svg, "grid", `M0,${y}H${history.kept}`);
  const parts = pieces(values, history.kept, end);
  const lines = parts.map((piece) => `M${piece[0][0] - 1},${piece[0][1]}L${piece.join(" ")}`);
  const areas = parts.map((piece, i) => `${lines[i]}V${HEIGHT}H${piece[0][0] - 1}Z`);
  makePath(svg, "area", areas.join(""));
  makePath(svg, "line", lines.join(""));
}

function rate(status, pick) {
  if (!before || status.time_s <= before.time_s) return 0;
  return Math.max(0, (pick(status) - pick(before)) / (status.time_s - before.time_s));
}

// Without the word that stands above the table.
const workerName = (worker) => worker.name.replace(/^R-worker /, "");

function showWorkers(status) {
  const now = status.figures.r_workers || [];
  const earlier = (before && before.figures.r_workers) || [];
  const rows = now.map((worker, place) => {
    const row = document.createElement("tr");
    const used = worker.kv_blocks ? worker.kv_blocks_used / worker.kv_blocks : 0;
    const busy = earlier[place] && status.time_s > before.time_s
      ? Math.min(1, (worker.busy_s - earlier[place].busy_s) / (status.time_s - before.time_s)) : 0;
    const cells = worker.lost === null
      ? [workerName(worker), "alive", `${few(used)} of ${count(worker.kv_blocks)} blocks`, `${count(worker.load_tokens)} tokens`, percent(Math.max(0, busy))]
      : [workerName(worker), `lost: ${worker.lost}`];
    if (worker.lost !== null) row.className = "lost";
    for (const text of cells) row.appendChild(document.createElement("td")).textContent = text;
    if (worker.lost !== null) row.lastChild.colSpan = 4;
    return row;
  });
  element("workers").replaceChildren(...rows);
}

function showSWorker(status) {
  const figures = status.figures;
  if (figures.lanes === undefined) return;
  const busy = rate(status, (s) => s.figures.s_compute_s || 0);
  const waits = rate(status, (s) => s.figures.wait_s || 0);
  show("lanes", figures.lanes === 1 ? "1 lane" : `${figures.lanes} lanes`);
  element("s-bar").firstElementChild.style.width = percent(Math.min(1, busy));
  show("s-text", `computes ${percent(Math.min(1, busy))} of the time, waits for R-workers ${percent(Math.min(1, waits))}`);
}

function showSinceStart(status) {
  show("finished", count(status.num_succeeded));
  show("failed", count(status.num_failed));
  show("aborted", count(status.num_aborted));
  show("rejected", count(status.num_rejected));
  show("cache-hits", status.prompt_tokens ? few(status.cached_tokens / status.prompt_tokens) : "–");
  show("uptime", duration(status.uptime_s));
  show("version", status.version);
}

function showAll(status) {
  const tokens = rate(status, (s) => s.generation_tokens);
  show("model", status.model);
  document.title = `${status.model} · FastDecode`;
  const lost = status.num_r_workers - status.num_live_r_workers;
  const isGood = status.state === "ready" && lost === 0;
  show("state", status.state + (lost ? `, ${lost} of ${status.num_r_workers} R-workers lost` : ""));
  element("state").className = isGood ? "good" : "bad";
  show("tokens-per-s", !before ? "–" : tokens < 10 ? tokens.toFixed(1) : count(tokens));
  show("running", count(status.num_running));
  show("waiting", count(status.num_waiting));
  show("kv-used", few(status.kv_used));
  show("ttft", pair(status.ttft_s));
  show("tpot", pair(status.tpot_s));
  showSinceStart(status);
  showSWorker(status);
  showWorkers(status);
  before = status;
}

async function turn() {
  if (!document.hidden) {
    try {
      showAll(await ask("/status.json"));
      if (numTurns++ % HISTORY_EVERY === 0) {
        const history = await ask("/history.json");
        for (const chart of CHARTS) draw(chart, history);
      }
      answeredAt = Date.now();
    } catch (error) {
      const silent = Math.round((Date.now() - answeredAt) / 1000);
      show("state", `no answer for ${silent} s: ${error.message}`);
      element("state").className = "bad";
    }
  }
  setTimeout(turn, EVERY_MS);
}

element("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", element("key").value);
});
turn();
