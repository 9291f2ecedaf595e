// The status page. Asks /status.json once a second while it is seen; what it
// shows is set as text, never as HTML.
"use strict";

const EVERY_MS = 1000;
const KEPT = 300; // five minutes
const SVG = "http://www.w3.org/2000/svg";
const history = { tokens: [], running: [], waiting: [] };
let before = null;
let answeredAt = Date.now();

const element = (id) => document.getElementById(id);
const show = (id, text) => { element(id).textContent = text; };
const seconds = (s) => (s === null || s === undefined ? "–" : s >= 1 ? `${s.toFixed(1)} s` : `${Math.round(s * 1000)} ms`);
const percent = (part) => `${Math.round(100 * part)}%`;

function key() {
  return sessionStorage.getItem("key");
}

async function ask() {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  const answer = await fetch("/status.json", { headers, cache: "no-store" });
  element("ask-key").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "a key is needed" : `status ${answer.status}`);
  return answer.json();
}

function keep(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

function draw(id, values) {
  const svg = element(id);
  const most = Math.max(1, ...values);
  const first = KEPT - values.length;
  const points = values.map((value, place) => `${first + place},${58 - (56 * value) / most}`).join(" ");
  let line = svg.firstElementChild;
  if (!line) line = svg.appendChild(document.createElementNS(SVG, "polyline"));
  line.setAttribute("points", points);
}

function rate(status, pick) {
  if (!before || status.time_s <= before.time_s) return 0;
  return Math.max(0, (pick(status) - pick(before)) / (status.time_s - before.time_s));
}

function showWorkers(status) {
  const now = status.figures.r_workers || [];
  const earlier = (before && before.figures.r_workers) || [];
  const rows = now.map((worker, place) => {
    const row = document.createElement("tr");
    const used = worker.kv_blocks ? worker.kv_blocks_used / worker.kv_blocks : 0;
    const busy = earlier[place] && status.time_s > before.time_s
      ? Math.min(1, (worker.busy_s - earlier[place].busy_s) / (status.time_s - before.time_s)) : 0;
    const cells = worker.lost === null
      ? [worker.name, "alive", `${percent(used)} of ${worker.kv_blocks} blocks`, `${worker.load_tokens} tokens`, percent(Math.max(0, busy))]
      : [worker.name, `lost: ${worker.lost}`, "–", "–", "–"];
    if (worker.lost !== null) row.className = "lost";
    for (const text of cells) row.appendChild(document.createElement("td")).textContent = text;
    return row;
  });
  element("workers").replaceChildren(...rows);
}

function showSWorker(status) {
  const figures = status.figures;
  if (figures.lanes === undefined) return;
  const busy = rate(status, (s) => s.figures.s_busy_s || 0);
  const waits = rate(status, (s) => s.figures.s_wait_s || 0);
  show("lanes", figures.lanes === 1 ? "1 lane" : `${figures.lanes} lanes`);
  element("s-bar").firstElementChild.style.width = percent(Math.min(1, busy));
  show("s-text", `computes ${percent(Math.min(1, busy))} of the time, waits for R-workers ${percent(Math.min(1, waits))}`);
}

function showAll(status) {
  const tokens = rate(status, (s) => s.generation_tokens);
  keep(history.tokens, tokens);
  keep(history.running, status.num_running);
  keep(history.waiting, status.num_waiting);
  show("model", status.model);
  document.title = `${status.model} · FastDecode`;
  const lost = status.num_r_workers - status.num_live_r_workers;
  const isGood = status.state === "ready" && lost === 0;
  show("state", status.state + (lost ? `, ${lost} of ${status.num_r_workers} R-workers lost` : ""));
  element("state").className = isGood ? "good" : "bad";
  show("tokens-per-s", tokens < 10 ? tokens.toFixed(1) : String(Math.round(tokens)));
  show("running", String(status.num_running));
  show("waiting", String(status.num_waiting));
  show("ttft", status.ttft_s.map(seconds).join(" / "));
  show("tpot", status.tpot_s.map(seconds).join(" / "));
  showSWorker(status);
  showWorkers(status);
  for (const [name, values] of Object.entries(history)) draw(`chart-${name}`, values);
  before = status;
}

async function turn() {
  if (!document.hidden) {
    try {
      showAll(await ask());
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
