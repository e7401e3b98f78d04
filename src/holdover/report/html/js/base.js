// What all parts of the page share: the data, the state, numbers for people, elements.

const D = await readData();
const S = D.strings;
const state = { plan: D.chosen, held: 0, span: null, zoom: null, stacked: "plain", axis: "ops", sizes: {} };
const listeners = [];

async function readData() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function onChange(keys, listener) {
  listeners.push([keys, listener]);
}

function set(changes) {
  const changed = Object.keys(changes).filter((k) => state[k] !== changes[k]);
  Object.assign(state, changes);
  for (const [keys, listener] of listeners) if (keys.some((k) => changed.includes(k))) listener(changed);
}

function running(deltas) {
  let sum = 0;
  return deltas.map((d) => (sum += d));
}

// -- numbers ---------------------------------------------------------------------------------------------------------

const two = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2, roundingMode: "halfEven" });
const one = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1, roundingMode: "halfEven" });
const whole = new Intl.NumberFormat("en-US");
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function bytesText(n) {
  const unit = UNITS.find(([, size]) => Math.abs(n) >= size);
  return unit ? `${two.format(n / unit[1])} ${unit[0]}` : `${whole.format(n)} B`;
}

function secondsText(s) {
  if (s === null || s === undefined) return "";
  if (s >= 1) return `${one.format(s)} s`;
  return s >= 1e-3 ? `${one.format(s * 1e3)} ms` : `${one.format(s * 1e6)} µs`;
}

function shareText(x, sign = false) {
  const percent = Math.round(x * 1000) / 10 + 0;
  return `${sign && percent >= 0 ? "+" : ""}${one.format(percent)} %`;
}

function ticksOf(most, count = 5) {
  if (!(most > 0)) return [0];
  const raw = most / count;
  const size = 2 ** Math.floor(Math.log2(raw));
  const step = raw / size > 1.5 ? size * 2 : size;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function tickText(n) {
  const unit = UNITS.find(([, size]) => n >= size);
  return unit ? `${+(n / unit[1]).toFixed(2)} ${unit[0]}` : `${n} B`;
}

// -- names -----------------------------------------------------------------------------------------------------------

const OUTSIDE = D.modules.path.length - 1;

function moduleName(m) {
  if (m === OUTSIDE) return "loss and code outside the model";
  return S[D.modules.path[m]] || S[D.modules.kind[m]] || "the model itself";
}

function opName(position) {
  return S[D.ops.name[position]].replace(/^aten\./, "").replace(/\.(default|Tensor|Scalar|int|self)$/, "");
}

function opText(position) {
  return `${opName(position)} in ${moduleName(D.ops.module[position])}`;
}

function clip(text, most) {
  return text.length > most ? `${text.slice(0, Math.max(3, Math.floor(most) - 1))}…` : text;
}

// -- elements --------------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const at = (id) => document.getElementById(id);

function bytesCell(n, tag = "td") {
  return h(tag, { class: "n", "data-bytes": n }, n ? bytesText(n) : "");
}

function table(headings, rows, caption) {
  const cell = (c) => (c instanceof Node ? c : h("td", typeof c === "number" ? { class: "n" } : null, typeof c === "number" ? whole.format(c) : c));
  return h("div", { class: "scroll" }, h("table", null,
    h("caption", { class: "visually-hidden" }, caption),
    h("thead", null, h("tr", null, headings.map((t) => h("th", { scope: "col", class: t.startsWith("#") ? "n" : null }, t.replace(/^#/, ""))))),
    h("tbody", null, rows.map((r) => h("tr", null, r.map(cell))))));
}

function alternative(element, build) {
  // The table behind a chart is made when somebody opens it.
  const details = element.querySelector("details.alternative");
  const show = () => {
    if (details.open) details.querySelector("div").replaceChildren(build());
  };
  details.addEventListener("toggle", show);
  return show;
}

function drawn(element, draw) {
  // Draw again whenever the room changes.
  let width = 0;
  const again = () => draw(Math.max(300, Math.floor(element.clientWidth)));
  new ResizeObserver(() => {
    if (element.clientWidth !== width) {
      width = element.clientWidth;
      again();
    }
  }).observe(element);
  return again;
}

// -- the step's ops along an axis --------------------------------------------------------------------------------------

const runs = {
  first: running(D.runs.first),
  phase: D.runs.phase,
  top: running(D.runs.top),
  count: D.runs.first.length,
};
runs.end = [...runs.first.slice(1), D.ops.name.length];

function axisEdges() {
  // Where each run begins and ends, from 0 to 1: by op, the optimizer's step drawn narrower, or by time.
  const widths = runs.first.map((first, i) => {
    if (state.axis === "time") return D.runs.seconds[i];
    return D.phases[runs.phase[i]] === "optimizer" ? 0 : runs.end[i] - first;
  });
  if (state.axis !== "time") {
    const rest = widths.reduce((a, b) => a + b, 0);
    const optimizer = widths.filter((w) => !w).length;
    for (let i = 0; i < widths.length; i++) if (!widths[i]) widths[i] = rest ? (rest * 0.12) / optimizer : 1;
  }
  const total = widths.reduce((a, b) => a + b, 0) || 1;
  let sum = 0;
  return [0, ...widths.map((w) => (sum += w) / total)];
}

function runAt(position) {
  let low = 0, high = runs.count - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (runs.first[middle] <= position) low = middle;
    else high = middle - 1;
  }
  return low;
}

function placeOf(edges, position) {
  // An op's place on the axis: before the step 0, after it 1.
  if (position < 0) return 0;
  if (position >= D.ops.name.length) return 1;
  const i = runAt(position);
  const inside = (position - runs.first[i]) / Math.max(1, runs.end[i] - runs.first[i]);
  return edges[i] + (edges[i + 1] - edges[i]) * inside;
}

function phaseRuns() {
  const found = [];
  runs.phase.forEach((phase, i) => {
    if (found.length && found.at(-1).phase === phase) found.at(-1).end = i + 1;
    else found.push({ phase, first: i, end: i + 1 });
  });
  return found;
}

function curveOf(watched) {
  return { live: running(watched.live), parts: watched.by_category.map(running), peak: watched.peak };
}

const curves = new Map();
function curve(which) {
  // "plain", or the number of a plan.
  if (!curves.has(which)) curves.set(which, curveOf(which === "plain" ? D.plain : D.plans[which]));
  return curves.get(which);
}

const plan = () => D.plans[state.plan];
