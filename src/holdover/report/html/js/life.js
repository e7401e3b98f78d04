// The life of one activation: made in forward, kept or dropped, needed in backward, made again, used, freed.

function heldText(i) {
  return `${moduleName(D.ops.module[heldMaker[i]])}: ${opName(heldMaker[i])}`;
}

function startLife() {
  const section = at("life");
  if (!D.held.bytes.length) return section.remove();
  const chart = section.querySelector(".chart"), list = at("life-list"), search = at("life-search");
  const order = D.held.bytes.map((_, i) => i);

  function options() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = order.filter((i) => {
      const text = `${heldText(i)} ${S[D.held.shape[i]]} ${S[D.held.name[i]]}`.toLowerCase();
      return words.every((w) => text.includes(w));
    });
    list.replaceChildren(...found.map((i) => h("option", { value: i, selected: i === state.held }, `${bytesText(D.held.bytes[i])}  ${heldText(i)}`)));
    at("life-count").textContent = `${whole.format(found.length)} of ${whole.format(order.length)} tensors`;
    if (found.length && !found.includes(state.held)) set({ held: found[0] });
    list.value = state.held;
  }

  function eventsOf(i, which) {
    const spans = heldStorage[i] < 0 ? [] : spansOf(heldStorage[i], which);
    const made = heldMaker[i];
    const readers = D.held.readers[i].map((d) => made + d), needers = running(D.held.needers[i]);
    const dropped = which !== "plain" && D.states[D.plans[which].held[i]] === "recompute" && spans.length > 1;
    const events = [{ at: made, what: "made", text: `made by ${opText(made)}` }];
    if (readers.length) events.push({ at: readers.at(-1), what: "used in forward", text: `last used in forward, by ${opText(readers.at(-1))}${readers.length > 1 ? ` (used ${readers.length} times)` : ""}` });
    spans.forEach(([from, to], k) => {
      if (k) events.push({ at: from, what: "made again", text: `made again, for ${from < D.ops.name.length ? opText(from) : "what follows"}` });
      const last = k === spans.length - 1;
      events.push({ at: to, what: last ? "freed" : "dropped", text: `${last ? "freed" : "dropped"}${to < D.ops.name.length ? `, before ${opText(to)}` : " after the step"}` });
    });
    for (const n of needers.slice(0, 6)) events.push({ at: n, what: "needed", text: `needed in backward by ${opText(n)}` });
    const rank = ["made", "used in forward", "dropped", "made again", "needed", "freed"];
    events.sort((p, q) => p.at - q.at || rank.indexOf(p.what) - rank.indexOf(q.what));
    return { spans, events, dropped };
  }

  function draw(width) {
    const i = state.held, lanes = D.plans.length ? [["plain", "as it is"], [state.plan, "with the plan"]] : [["plain", "as it is"]];
    const left = 104, right = 12, top = 84, lane = 76, height = top + lanes.length * lane + 26;
    const edges = axisEdges();
    const x = (position) => left + placeOf(edges, position) * (width - left - right);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Life of ${heldText(i)}; the events are listed below.` });
    const most = Math.max(...curve("plain").live, 1);
    const profile = (c) => runs.first.map((_, k) => `${k ? "L" : "M"}${(left + edges[k] * (width - left - right)).toFixed(1)} ${(62 - (c.live[k] / most) * 52).toFixed(1)}H${(left + edges[k + 1] * (width - left - right)).toFixed(1)}`).join("");
    svg.append(s("path", { d: `${profile(curve("plain"))}V62H${left}Z`, fill: "var(--faint)" }),
      s("text", { class: "soft", x: left - 10, y: 40, "text-anchor": "end" }, "all memory"));
    for (const p of phaseRuns()) {
      const xa = left + edges[p.first] * (width - left - right), xb = left + edges[p.end] * (width - left - right);
      svg.append(s("line", { class: "axis", x1: xa, x2: xa, y1: 8, y2: height - 18 }));
      if (xb - xa > D.phases[p.phase].length * 7) svg.append(s("text", { class: "soft", x: xa + 5, y: height - 6 }, D.phases[p.phase]));
    }
    lanes.forEach(([which, name], row) => {
      const { spans, events } = eventsOf(i, which);
      const y = top + row * lane + 22;
      svg.append(s("text", { class: "strong", x: left - 10, y: y + 12, "text-anchor": "end" }, name));
      spans.forEach(([from, to], k) => {
        svg.append(s("rect", { x: x(from), y, width: Math.max(2.5, x(to) - x(from)), height: 16, rx: 2, fill: k ? "var(--recompute)" : "var(--activation)", "data-lane": name, "data-from": from, "data-to": to }));
        if (k) svg.append(s("line", { x1: x(spans[k - 1][1]), x2: x(from), y1: y + 8, y2: y + 8, stroke: "var(--soft)", "stroke-dasharray": "2 4", "stroke-width": 1.5 }));
      });
      const shown = events.filter((e, k) => k === 0 || e.what !== events[k - 1].what);
      for (const e of shown) {
        const px = x(e.at), above = ["made", "dropped", "made again", "freed"].includes(e.what);
        if (above) svg.append(s("line", { x1: px, x2: px, y1: y - 4, y2: y + 16, stroke: "var(--ink)", "stroke-width": 1.25 }));
        else svg.append(s("path", { d: `M${px} ${y + 18}l-5 8h10z`, fill: "var(--ink)" }));
      }
      // Labels in order, each where the one before it ends: above the bar what befalls it, below it who uses it.
      for (const [kinds, ty] of [[["made", "dropped", "made again", "freed"], y - 8], [["used in forward", "needed"], y + 40]]) {
        const labels = shown.filter((e) => kinds.includes(e.what)).map((e) => ({ text: e.what, x: x(e.at) - 4, wide: e.what.length * 7.2 + 12 }));
        let free = -100, end = width + 12;
        for (const l of labels) free = (l.x = Math.max(l.x, free)) + l.wide;
        for (const l of labels.reverse()) end = l.x = Math.min(l.x, end - l.wide);
        for (const l of labels) svg.append(s("text", { class: "halo", x: l.x, y: ty }, l.text));
      }
    });
    chart.replaceChildren(svg);
    facts(i);
  }

  function facts(i) {
    const made = heldMaker[i], m = D.ops.module[made];
    const needers = running(D.held.needers[i]);
    const p = D.plans.length ? plan() : null;
    const reason = p ? D.reasons[Object.keys(D.reasons)[p.reasons[i]]] : D.reasons["no plan"];
    const obstacle = S[D.held.obstacle[i]];
    const seconds = D.held.seconds[i];
    const rows = [
      ["tensor", `${S[D.held.shape[i]] || "shape not seen"}, ${S[D.held.dtype[i]]}`],
      ["its name", h("code", { title: "as holdover explain takes it" }, S[D.held.name[i]])],
      ["bytes", h("span", { id: "life-bytes", "data-bytes": D.held.bytes[i] }, bytesText(D.held.bytes[i]))],
      ["made by", `${S[D.ops.name[made]]}, op ${whole.format(made)} of the step`],
      ["module", `${moduleName(m)}${m === OUTSIDE ? "" : ` (${S[D.modules.kind[m]]})`}`],
      ["needed by", needers.length ? [...new Set(needers.map(opText))].join("; ") : "no op of this backward reads it"],
      ["its replay takes", seconds === null ? `not possible${obstacle ? `: ${obstacle}` : ""}` : seconds ? `${secondsText(seconds)} for its own op${D.held.bytes[i] ? `, ${secondsText((seconds / D.held.bytes[i]) * 2 ** 30)} for each GiB` : ""}` : "not priced"],
      ["choice", h("span", { id: "life-choice" }, reason + (obstacle && seconds === null && !reason.includes(obstacle) ? ` (${obstacle})` : ""))],
    ];
    at("life-facts").replaceChildren(...rows.flatMap(([t, d]) => [h("dt", null, t), h("dd", null, d)]));
    const which = D.plans.length ? state.plan : "plain";
    at("life-events").replaceChildren(...eventsOf(i, which).events.map((e) => h("li", null, `op ${whole.format(Math.max(e.at, 0))}: ${e.text}`)));
    at("life-title").textContent = heldText(i);
  }

  const again = drawn(chart, draw);
  onChange(["held", "plan", "axis"], again);
  onChange(["held"], () => (list.value = state.held));
  list.addEventListener("change", () => set({ held: Number(list.value) }));
  search.addEventListener("input", options);
  const weight = (i) => (heldStorage[i] < 0 ? 0 : D.held.bytes[i] * D.storages.length[heldStorage[i]]);
  const dropped = D.plans.length ? order.filter((i) => D.states[plan().held[i]] === "recompute") : [];
  // Opens with what takes most room for longest, of what the plan drops if it drops anything.
  const start = (dropped.length ? dropped : order).reduce((best, i) => (weight(i) > weight(best) ? i : best));
  state.held = start;
  options();
}
