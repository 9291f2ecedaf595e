// Runs the status page's script without a browser: a document that only keeps
// what it is told, and answers of a server read from stdin, one a line. Prints
// what stands where at the end, as JSON.
"use strict";
const fs = require("fs");

const script = fs.readFileSync(process.argv[2], "utf8");
const answers = fs.readFileSync(0, "utf8").trim().split("\n").map((line) => JSON.parse(line));

function makeElement() {
  return {
    children: [], style: {}, className: "", hidden: false, own: "",
    get textContent() { return this.own + this.children.map((child) => child.textContent).join("|"); },
    set textContent(text) { this.own = String(text); this.children = []; },
    set innerHTML(text) { throw new Error("text is set as HTML"); },
    get firstElementChild() { return this.children[0] || null; },
    get lastChild() { return this.children[this.children.length - 1]; },
    appendChild(child) { this.children.push(child); return child; },
    replaceChildren(...children) { this.children = children; },
    attributes: {},
    setAttribute(name, value) { this.attributes[name] = value; },
    addEventListener() {},
  };
}

const elements = {};
global.document = {
  hidden: false, title: "", createElement: makeElement, createElementNS: makeElement,
  getElementById(id) {
    if (!elements[id]) {
      elements[id] = makeElement();
      if (id === "s-bar") elements[id].appendChild(makeElement());
    }
    return elements[id];
  },
};
global.sessionStorage = { getItem: () => null, setItem() {} };
const history = {
  every_s: 2, kept: 300, tokens_per_s: [10, 170, null, 130], num_running: [1, 3, null, 2],
  num_waiting: [0, 0, null, 0], kv_used: [0.1, 0.25, null, 0.05],
};
const fetched = [];
global.fetch = async (path) => {
  fetched.push(path);
  return { ok: true, status: 200, json: async () => (path === "/history.json" ? history : answers.shift()) };
};
global.setTimeout = (turn) => {
  if (answers.length) return setImmediate(turn);
  const said = {};
  for (const [id, element] of Object.entries(elements)) {
    said[id] = { text: element.textContent, kind: element.className, kinds: element.children.map((c) => c.className) };
  }
  const paths = elements.charts.children.map((figure) => figure.children[1].children[0].children.map((path) => path.attributes.d));
  console.log(JSON.stringify({ ...said, paths, fetched }));
};
eval(script);
