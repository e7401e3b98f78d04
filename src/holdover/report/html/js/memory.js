// Memory over the step: bytes live by category, with the plan on the same axis.

// Drawn from below: what stays through the step first, what comes and goes on top.
const ORDER = ["parameter", "buffer", "optimizer", "input", "gradient", "activation", "temporary"].map((c) => D.categories.indexOf(c));
const WORDS = { parameter: "weights", buffer: "buffers", optimizer: "optimizer state", input: "inputs", gradient: "gradients", activation: "activations", temporary: "temporaries" };

function spansOf(i, which) {
  // When storage i is there, as pairs of ops; under a plan where that changes it.
  const base = storageFrom[i];
  if (which !== "plain") {
    const changed = planSpans(which).get(i);
    if (changed) return changed.map(([a, b]) => [base + a, base + b]);
  }
  return [[base, base + D.storages.length[i]], ...(D.storages.again[i] ?? [])];
}

const storageFrom = running(D.storages.from);
const planSpansFound = new Map();
function planSpans(k) {
  if (!planSpansFound.has(k)) {
    planSpansFound.set(k, new Map(D.plans[k].spans.map(([i, ...edges]) => [i, edges.flatMap((e, j) => (j % 2 ? [] : [[e, edges[j + 1]]]))])));
  }
  return planSpansFound.get(k);
}

function storageText(i) {
  const m = D.storages.module[i];
  const name = S[D.storages.name[i]].replace(/^aten\./, "").replace(/\.(default|Tensor|Scalar|int|self)$/, "");
  return m < 0 ? name : `${name} in ${moduleName(m)}`;
}

function startMemory() {
  const section = at("memory");
  const chart = section.querySelector(".chart");
  const last = runs.count - 1;
  let cursor = null, from = null, geometry = null;

  const shownCurve = () => curve(state.stacked === "plain" || !D.plans.length ? "plain" : state.plan);
  const range = () => state.zoom ?? [0, last];

  function draw(width) {
    const height = 380, left = 72, right = 10, top = 46, foot = height - 34;
    const edges = axisEdges(), [a, b] = range();
    const x0 = edges[a], x1 = edges[b + 1];
    const x = (share) => left + ((share - x0) / (x1 - x0)) * (width - left - right);
    const plain = curve("plain"), planned = D.plans.length ? curve(state.plan) : null;
    let most = 0;
    for (let i = a; i <= b; i++) most = Math.max(most, plain.live[i], planned ? planned.live[i] : 0);
    most *= 1.04;
    const y = (n) => foot - ((foot - top) * n) / most;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "interactive", tabindex: 0, role: "slider", "aria-label": "Moment of the step",
      "aria-valuemin": 0, "aria-valuemax": last, "aria-describedby": "memory-keys" });
    for (const t of ticksOf(most)) {
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }),
        s("text", { class: "soft", x: left - 8, y: y(t) + 4, "text-anchor": "end" }, tickText(t)));
    }
    const stacked = shownCurve();
    const below = new Array(b - a + 1).fill(0);
    for (const k of ORDER) {
      const part = stacked.parts[k];
      let there = false, forth = "", back = "";
      for (let i = a; i <= b; i++) {
        const low = below[i - a], high = low + part[i];
        there ||= part[i] > 0;
        below[i - a] = high;
        const left = x(edges[i]).toFixed(1), right = x(edges[i + 1]).toFixed(1);
        forth += `${i === a ? "M" : "L"}${left} ${y(high).toFixed(1)}H${right}`;
        back = `L${right} ${y(low).toFixed(1)}H${left}` + back;
      }
      if (there) svg.append(s("path", { d: `${forth}${back}Z`, fill: `var(--${D.categories[k]})`, "data-category": D.categories[k] }));
    }
    const outline = (c) => {
      let d = "";
      for (let i = a; i <= b; i++) d += `${i === a ? "M" : "L"}${x(edges[i]).toFixed(1)} ${y(c.live[i]).toFixed(1)}H${x(edges[i + 1]).toFixed(1)}`;
      return d;
    };
    if (planned && D.plans[state.plan].recomputed.length) {
      const [name, over] = state.stacked === "plain" ? ["plan-line", planned] : ["plain-line", plain];
      svg.append(s("path", { class: "under-line", d: outline(over) }), s("path", { class: name, d: outline(over) }));
    }
    for (const p of phaseRuns()) {
      const [start, end] = [Math.max(p.first, a), Math.min(p.end, b + 1)];
      if (start >= end) continue;
      const [xa, xb] = [x(edges[start]), x(edges[end])];
      svg.append(s("line", { class: "axis", x1: xa, x2: xa, y1: top, y2: foot + 6 }));
      const name = D.phases[p.phase];
      if (xb - xa > name.length * 7) svg.append(s("text", { class: "soft", x: xa + 5, y: foot + 20 }, name));
    }
    svg.append(s("line", { class: "axis", x1: left, x2: width - right, y1: foot, y2: foot }));
    const mark = (c, text, row, dot) => {
      const i = runAt(c.peak.at);
      if (i < a || i > b) return;
      const px = (x(edges[i]) + x(edges[i + 1])) / 2, py = y(c.peak.bytes);
      const leftwards = px > width * 0.55, ty = 14 + row * 18;
      svg.append(s("path", { d: `M${px} ${py - 4}V${ty + 5}`, stroke: "var(--ink)", "stroke-width": 1, fill: "none" }),
        s("circle", { cx: px, cy: py, r: 4, fill: dot, stroke: "var(--ground)", "stroke-width": 1.5 }),
        s("text", { class: "halo", x: px + (leftwards ? -6 : 6), y: ty + 4, "text-anchor": leftwards ? "end" : "start" },
          s("tspan", { class: "strong" }, bytesText(c.peak.bytes)), ` ${clip(text, (leftwards ? px : width - px) / 6.9 - 14)}`));
    };
    mark(plain, `peak, ${opText(plain.peak.at)}`, 0, "var(--ink)");
    if (planned && D.plans[state.plan].recomputed.length) mark(planned, `peak with the plan, ${opText(planned.peak.at)}`, 1, "var(--recompute)");
    const band = s("rect", { class: "span", y: top, height: foot - top, width: 0, x: 0 });
    const line = s("line", { class: "cursor", y1: top, y2: foot, visibility: "hidden" });
    svg.append(band, line);
    chart.replaceChildren(svg);
    geometry = { svg, edges, x, x0, x1, left, right, width, band, line };
    listen(svg);
    showCursor();
    showBand();
    refresh();
  }

  function runUnder(event) {
    const box = geometry.svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * geometry.width;
    const share = geometry.x0 + ((px - geometry.left) / (geometry.width - geometry.left - geometry.right)) * (geometry.x1 - geometry.x0);
    const [a, b] = range();
    for (let i = a; i <= b; i++) if (geometry.edges[i + 1] > share) return i;
    return b;
  }

  function listen(svg) {
    svg.addEventListener("pointermove", (event) => {
      cursor = runUnder(event);
      if (from !== null && Math.abs(cursor - from) > 0) set({ span: [Math.min(from, cursor), Math.max(from, cursor)] });
      showCursor();
    });
    svg.addEventListener("pointerdown", (event) => {
      from = runUnder(event);
      svg.setPointerCapture(event.pointerId);
      set({ span: [from, from] });
    });
    svg.addEventListener("pointerup", () => (from = null));
    svg.addEventListener("pointerleave", () => {
      if (from === null && document.activeElement !== svg) {
        cursor = null;
        showCursor();
      }
    });
    svg.addEventListener("keydown", (event) => {
      const [a, b] = range();
      const here = cursor ?? runAt(shownCurve().peak.at);
      const far = Math.max(1, Math.round((b - a) / 20));
      const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: -far, PageDown: far, Home: a - here, End: b - here };
      if (event.key in moves) {
        const next = Math.min(b, Math.max(a, here + moves[event.key]));
        if (event.shiftKey) {
          const fixed = state.span ? (state.span[0] === here ? state.span[1] : state.span[0]) : here;
          set({ span: [Math.min(fixed, next), Math.max(fixed, next)] });
        }
        cursor = next;
        showCursor();
      } else if (event.key === "Enter" || event.key === " ") set({ span: [here, here] });
      else if (event.key === "Escape") set({ span: null, zoom: null });
      else if (event.key === "+" || event.key === "=") zoomTo(state.span && state.span[1] > state.span[0] ? state.span : [Math.round(here - (b - a) / 4), Math.round(here + (b - a) / 4)]);
      else if (event.key === "-") set({ zoom: null });
      else return;
      event.preventDefault();
    });
  }

  function zoomTo([a, b]) {
    const low = Math.max(0, a), high = Math.min(last, Math.max(b, a + 4));
    set({ zoom: [low, high] });
    chart.querySelector("svg").focus({ preventScroll: true });
  }

  function showCursor() {
    const c = shownCurve();
    const i = cursor ?? runAt(c.peak.at);
    geometry.line.setAttribute("visibility", cursor === null ? "hidden" : "visible");
    const middle = geometry.x((geometry.edges[i] + geometry.edges[i + 1]) / 2);
    geometry.line.setAttribute("x1", middle);
    geometry.line.setAttribute("x2", middle);
    const atPeak = i === runAt(c.peak.at);
    const position = c === curve("plain") ? runs.top[i] : atPeak ? c.peak.at : runs.first[i];
    at("memory-when").textContent = cursor === null ? "At the peak" : atPeak ? "Here: the peak" : "Here";
    const [first, end] = [runs.first[i], runs.end[i]];
    at("memory-where").textContent = `${D.phases[runs.phase[i]]}, op ${whole.format(first)}${end - first > 1 ? ` to ${whole.format(end - 1)}` : ""} of ${whole.format(D.ops.name.length)}: ${opText(position)}`;
    const body = at("memory-legend");
    body.replaceChildren(...[...ORDER].reverse().filter((k) => c.parts[k].some((n) => n)).map((k) =>
      h("tr", null, h("td", null, h("span", { class: "swatch", style: `background:var(--${D.categories[k]})` }), WORDS[D.categories[k]]),
        h("td", { class: "n", "data-bytes": c.parts[k][i] }, bytesText(c.parts[k][i])))),
      h("tr", { class: "total" }, h("td", null, "together"), h("td", { class: "n", "data-bytes": c.live[i] }, bytesText(c.live[i]))));
    const svg = geometry.svg;
    svg.setAttribute("aria-valuenow", i);
    svg.setAttribute("aria-valuetext", `${at("memory-where").textContent}; ${bytesText(c.live[i])}`);
  }

  function showBand() {
    const span = state.span;
    at("span").hidden = !span;
    at("span-zoom").disabled = !span || span[0] === span[1];
    at("span-whole").disabled = !state.zoom;
    if (!span) return geometry.band.setAttribute("width", 0);
    const [xa, xb] = [geometry.x(geometry.edges[span[0]]), geometry.x(geometry.edges[span[1] + 1])];
    geometry.band.setAttribute("x", Math.max(xa, geometry.left));
    geometry.band.setAttribute("width", Math.max(1.5, Math.min(xb, geometry.width - geometry.right) - Math.max(xa, geometry.left)));
    showInhabitants(span);
  }

  function showInhabitants([a, b]) {
    const which = state.stacked === "plain" || !D.plans.length ? "plain" : state.plan;
    const c = curve(which);
    const [first, end] = [runs.first[a], runs.end[b] - 1];
    let top = a;
    for (let i = a; i <= b; i++) if (c.live[i] > c.live[top]) top = i;
    const found = [];
    D.storages.bytes.forEach((n, i) => {
      const overlapping = spansOf(i, which).filter(([x, y]) => x <= end && y >= first);
      if (overlapping.length) found.push([n, i, overlapping[0]]);
    });
    found.sort((p, q) => q[0] - p[0] || p[1] - q[1]);
    const phases = [...new Set(runs.phase.slice(a, b + 1).map((p) => D.phases[p]))].join(", ");
    at("span-title").textContent = `From op ${whole.format(first)} to op ${whole.format(end)} (${phases}): at most ${bytesText(c.live[top])}`;
    const shown = found.slice(0, 25);
    at("span-list").replaceChildren(
      h("p", { class: "small" }, `${whole.format(found.length)} tensors made in the step live here${which === "plain" ? "" : ", with the plan"}; the ${shown.length} largest:`),
      table(["tensor", "category", "#bytes", "lives"], shown.map(([n, i, [x, y]]) => [
        storageText(i), WORDS[D.categories[D.storages.category[i]]], bytesCell(n), lifeText(x, y)]), "Tensors that live in the selected span"));
  }

  function lifeText(x, y) {
    const from = x < 0 ? "from before the step" : `from op ${whole.format(x)}`;
    return y >= D.ops.name.length ? `${from} on` : `${from} to op ${whole.format(y)}`;
  }

  function explain() {
    const p = D.plain.peak;
    const parts = ORDER.map((k) => [p.parts[k], WORDS[D.categories[k]]]).filter(([n]) => n).sort((x, y) => y[0] - x[0]);
    const large = p.largest.slice(0, 3).map((i) => `${storageText(i)} (${bytesText(D.storages.bytes[i])})`);
    at("peak-why").textContent = `The peak stands in ${D.phases[runs.phase[runAt(p.at)]]}, at ${opText(p.at)}. ` +
      `It is made of ${parts.slice(0, 4).map(([n, w]) => `${w} ${bytesText(n)}`).join(", ")}${parts.length > 4 ? " and less than that of others" : ""}. ` +
      (large.length ? `The largest tensors then, weights aside: ${large.join("; ")}.` : "");
    if (D.peak_bytes > p.bytes) at("peak-why").append(` The first step, not shown, goes higher: ${bytesText(D.peak_bytes)}.`);
  }

  const again = drawn(chart, draw);
  const refresh = alternative(section, () => {
    const plain = curve("plain"), planned = D.plans.length ? curve(state.plan) : null;
    return h("div", { class: "scroll tall" }, table(["#op", "phase", "module", "#bytes", ...(planned ? ["#with the plan"] : [])],
      plain.live.map((n, i) => [runs.top[i], D.phases[runs.phase[i]], opText(runs.top[i]), bytesCell(n), ...(planned ? [bytesCell(planned.live[i])] : [])]), "Bytes live over the step"));
  });
  onChange(["plan", "stacked", "zoom", "axis"], again);
  onChange(["span"], showBand);
  for (const input of section.querySelectorAll("input[name=stacked]")) input.addEventListener("change", () => set({ stacked: input.value }));
  for (const input of section.querySelectorAll("input[name=axis]")) input.addEventListener("change", () => set({ axis: input.value }));
  at("span-zoom").addEventListener("click", () => zoomTo(state.span));
  at("span-whole").addEventListener("click", () => set({ zoom: null }));
  at("span-clear").addEventListener("click", () => set({ span: null }));
  explain();
}
