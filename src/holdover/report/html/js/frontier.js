// The frontier: peak against extra time; the plan that all of the page shows; which values it flips, module by module.

const heldMaker = running(D.held.maker);
const heldStorage = running(D.held.storage);

function startFrontier() {
  const section = at("frontier");
  if (!D.plans.length) return section.remove();
  const chart = section.querySelector(".chart");
  const lowestFixed = D.weights_bytes + D.gradients_bytes + D.optimizer_bytes + D.inputs_bytes;

  function draw(width) {
    const height = 360, left = 58, right = 20, top = 28, foot = height - 44;
    const peaks = [...D.plans, ...D.policies].map((p) => p.peak_bytes);
    const low = Math.min(...peaks), high = Math.max(...peaks);
    const pad = (high - low || high || 1) * 0.06;
    const [x0, x1] = [Math.max(0, low - pad), high + pad];
    const most = Math.max(...[...D.plans, ...D.policies].map((p) => p.extra_time), 0.001) * 1.12;
    const x = (n) => left + ((n - x0) / (x1 - x0)) * (width - left - right);
    const y = (t) => foot - (t / most) * (foot - top);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "interactive", role: "img", "aria-label": `Extra time against peak memory: ${D.plans.length} plans. The slider at the top of the page chooses one.` });
    const raw = most / 5, size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((n) => n * size >= raw) * size;
    for (let t = 0; t <= most; t += step) {
      svg.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }),
        s("text", { class: "soft", x: left - 8, y: y(t) + 4, "text-anchor": "end" }, `${+(100 * t).toFixed(2)} %`));
    }
    for (const t of ticksOf(x1, 6).filter((t) => t >= x0)) {
      svg.append(s("line", { class: "grid", x1: x(t), x2: x(t), y1: top, y2: foot }),
        s("text", { class: "soft", x: x(t), y: foot + 18, "text-anchor": "middle" }, tickText(t)));
    }
    svg.append(s("text", { class: "soft", x: width - right, y: height - 6, "text-anchor": "end" }, "peak of the step"),
      s("text", { class: "soft", x: left, y: 14 }, "extra time, share of the step"));
    const stairs = (key) => D.plans.map((p, i) => i ? `H${x(p.peak_bytes)}V${y(p[key])}` : `M${x(p.peak_bytes)} ${y(p[key])}`).join("");
    svg.append(s("path", { d: `${stairs("bound_extra_time")}V${y(0)}H${x(D.plans[0].peak_bytes)}Z`, fill: "var(--faint)" }));
    const last = D.plans.at(-1);
    if (y(0) - y(last.bound_extra_time) > 22) svg.append(s("text", { class: "soft", x: x(last.peak_bytes) + 8, y: y(0) - 8 }, "proved: no plan lies in here"));
    svg.append(s("path", { d: stairs("extra_time"), fill: "none", stroke: "var(--activation)", "stroke-width": 1.5 }));
    D.plans.forEach((p, i) => svg.append(s("circle", { cx: x(p.peak_bytes), cy: y(p.extra_time), r: i === state.plan ? 7 : 3.5, fill: i === state.plan ? "var(--recompute)" : "var(--activation)", stroke: "var(--ground)", "stroke-width": 1.5, "data-plan": i },
      s("title", null, `${bytesText(p.peak_bytes)}, ${shareText(p.extra_time, true)}`))));
    // Labels keep out of each other's way: each takes the first free place beside its point.
    const taken = [];
    const label = (px, py, text, strong, offset) => {
      const wide = text.length * 7.2;
      const places = [[px + offset, py + 4, "start"], [px - offset, py + 4, "end"], [px - offset, py + 20, "end"], [px + offset, py - 12, "start"], [px + offset, py - 28, "start"]];
      const boxes = places.map(([tx, ty, anchor]) => (anchor === "end" ? [tx - wide, tx, ty] : [tx, tx + wide, ty]));
      const curve = (box) => !strong || D.plans.every((p) => !(x(p.peak_bytes) > box[0] - 4 && x(p.peak_bytes) < box[1] + 4 && Math.abs(y(p.extra_time) - box[2] + 4) < 12));
      const free = boxes.findIndex((box) => box[0] > left && box[1] < width - 4 && curve(box) && taken.every((o) => o[1] < box[0] || o[0] > box[1] || Math.abs(o[2] - box[2]) > 15));
      const [tx, ty, anchor] = places[Math.max(free, 0)];
      taken.push(boxes[Math.max(free, 0)]);
      svg.append(s("text", { class: strong ? "halo strong" : "halo", x: tx, y: ty, "text-anchor": anchor }, text));
    };
    const end = D.plans[0], now = plan();
    if (D.knee && D.knee.plan !== null) {
      const [px, py] = [x(D.knee.budget_bytes), y(D.knee.extra_time)];
      svg.append(s("circle", { cx: px, cy: py, r: 10, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, "data-knee": D.knee.plan },
        s("title", null, `below this, bytes are dear: ${bytesText(D.knee.budget_bytes)}, ${shareText(D.knee.extra_time, true)}`)));
      if (state.plan !== D.knee.plan) label(px, py, "dear below this", false, 14);
    }
    if (state.plan) label(x(now.peak_bytes), y(now.extra_time), `this plan: ${bytesText(now.peak_bytes)}, ${shareText(now.extra_time, true)}`, true, 13);
    for (const p of D.policies) {
      const [px, py] = [x(p.peak_bytes), y(p.extra_time)];
      svg.append(s("rect", { x: px - 5, y: py - 5, width: 10, height: 10, transform: `rotate(45 ${px} ${py})`, fill: "var(--ground)", stroke: "var(--ink)", "stroke-width": 1.5, "data-policy": p.name },
        s("title", null, `${p.about}: ${bytesText(p.peak_bytes)}, ${shareText(p.extra_time, true)}`)));
      label(px, py, p.name, false, 12);
    }
    svg.append(s("text", { class: "halo", x: x(end.peak_bytes) - 8, y: y(0) - 10, "text-anchor": "end" }, "the step as it is"));
    const choose = (event) => {
      const box = svg.getBoundingClientRect();
      const n = x0 + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x1 - x0);
      const found = D.plans.findIndex((p) => p.peak_bytes <= n);
      set({ plan: found < 0 ? D.plans.length - 1 : found });
    };
    svg.addEventListener("pointerdown", (event) => {
      chart.setPointerCapture(event.pointerId); // the drawing is made anew while the pointer moves
      choose(event);
    });
    chart.onpointermove = (event) => event.buttons && choose(event);
    chart.replaceChildren(svg);
  }

  const again = drawn(chart, draw);
  onChange(["plan"], again);
  alternative(section, () => table(["#plan", "#peak", "#extra time", "#proved bound"], [
    ...D.plans.map((p, i) => [i, bytesCell(p.peak_bytes), h("td", { class: "n" }, shareText(p.extra_time, true)), h("td", { class: "n" }, shareText(p.bound_extra_time, true))]),
    ...D.policies.map((p) => [h("td", { class: "n" }, p.name), bytesCell(p.peak_bytes), h("td", { class: "n" }, shareText(p.extra_time, true)), h("td", { class: "n" }, "")]),
  ], "Plans and policies"))();
  startBudget();
  startTree();
  if (D.knee) {
    const low = D.plans.at(-1), share = (t) => shareText(t, true);
    at("knee").append(`The last bytes are dear: the lowest peak, ${bytesText(low.peak_bytes)}, takes ${share(low.extra_time)} time, a budget of ${bytesText(D.knee.budget_bytes)} about ${share(D.knee.extra_time)}. `);
    if (D.knee.plan !== null) at("knee").append(h("button", { type: "button", class: "no-print", id: "knee-show", onclick: () => set({ plan: D.knee.plan }) }, "Show that plan"));
  } else at("knee").remove();
  const words = D.policies.map((p) => `${p.name} (${p.about})`);
  at("policies").textContent = words.length ? `Diamonds are modelled, for comparison: ${words.join("; ")}.` : "This model has no blocks that repeat, so usual activation checkpointing has no points here.";
}

function startBudget() {
  // One slider for the whole page: from the step as it is, on the right, down to the floor, on the left.
  const range = at("budget"), last = D.plans.length - 1;
  range.max = last;
  const show = () => {
    const p = plan();
    range.value = last - state.plan;
    const text = state.plan
      ? `peak ${bytesText(p.peak_bytes)} (${shareText(p.peak_bytes / D.plans[0].peak_bytes - 1)}), extra time ${shareText(p.extra_time, true)}, proved: at least ${shareText(p.bound_extra_time, true)}`
      : `peak ${bytesText(p.peak_bytes)}, nothing recomputed`;
    at("budget-text").textContent = p.reserved_bytes ? `${text}; reserved on ${D.device} ${bytesText(p.reserved_bytes)}` : text;
    at("budget-text").dataset.bytes = p.peak_bytes;
    range.setAttribute("aria-valuetext", text);
  };
  range.addEventListener("input", () => set({ plan: last - Number(range.value) }));
  onChange(["plan"], show);
  show();
}

function flipsOf(k) {
  // Values that change with the step from the next larger budget to this one.
  if (!k) return [];
  const [before, now] = [D.plans[k - 1].held, D.plans[k].held];
  return now.flatMap((state, i) => (state !== before[i] ? [i] : []));
}

function startTree() {
  const box = at("tree");
  const children = new Map(), values = new Map();
  D.modules.parent.forEach((p, m) => children.set(p, [...(children.get(p) ?? []), m]));
  heldMaker.forEach((maker, i) => {
    const m = D.ops.module[maker];
    values.set(m, [...(values.get(m) ?? []), i]);
  });
  const inside = new Map();
  const allInside = (m) => {
    if (!inside.has(m)) inside.set(m, [...(values.get(m) ?? []), ...(children.get(m) ?? []).flatMap(allInside)]);
    return inside.get(m);
  };
  const open = new Set([0]);
  const most = () => Math.max(1, ...[0, OUTSIDE].map((m) => allInside(m).reduce((t, i) => t + D.held.bytes[i], 0)));

  function bar(list) {
    const sums = [0, 0, 0];
    for (const i of list) sums[plan().held[i]] += D.held.bytes[i];
    const total = sums.reduce((a, b) => a + b, 0) || 1;
    return [sums, h("span", { class: "bar", "aria-hidden": "true" }, D.states.map((name, k) => sums[k] ? h("i", { class: name, style: `width:${(100 * sums[k]) / total}%` }) : null))];
  }

  function node(m, flipped) {
    const list = allInside(m);
    if (!list.length) return null;
    const has = values.get(m)?.length || (children.get(m) ?? []).some((c) => allInside(c).length);
    const [sums, picture] = bar(list);
    const path = m === OUTSIDE ? moduleName(m) : S[D.modules.path[m]];
    const above = D.modules.parent[m] > 0 ? S[D.modules.path[D.modules.parent[m]]] + "." : "";
    const label = m === OUTSIDE || !path ? moduleName(m) : path.slice(above.length);
    const fold = h("button", { class: "fold", type: "button", "aria-expanded": open.has(m), "aria-label": `${label}, ${open.has(m) ? "close" : "open"}`, "data-module": m, onclick: () => {
      open.has(m) ? open.delete(m) : open.add(m);
      show();
      box.querySelector(`button[data-module="${m}"]`)?.focus();
    } }, open.has(m) ? "▾" : "▸");
    const row = h("li", { class: list.some((i) => flipped.has(i)) ? "flip" : null },
      h("div", { class: "line" },
        h("span", { class: "name", title: path }, has ? fold : h("span", { class: "nofold" }), label, " ", h("span", { class: "soft" }, m === OUTSIDE || !path ? "" : S[D.modules.kind[m]])),
        picture, h("span", { "data-kept": sums[0] + sums[2] }, bytesText(sums[0] + sums[2])), h("span", { "data-dropped": sums[1] }, sums[1] ? bytesText(sums[1]) : "")));
    if (open.has(m)) row.append(h("ul", null, (values.get(m) ?? []).map((i) => leaf(i, flipped)), (children.get(m) ?? []).map((c) => node(c, flipped))));
    return row;
  }

  function leaf(i, flipped) {
    const name = D.states[plan().held[i]], n = D.held.bytes[i];
    return h("li", { class: flipped.has(i) ? "flip" : null, "data-held": i, "data-state": name }, h("div", { class: "line" },
      h("span", { class: "name" }, h("span", { class: "nofold" }), h("button", { type: "button", class: "value", title: "see its life", onclick: () => { set({ held: i }); at("life").scrollIntoView(); } }, opName(heldMaker[i])), " ", h("span", { class: "soft" }, S[D.held.shape[i]])),
      h("span", { class: `state ${name}` }, { keep: "kept", recompute: "recomputed", pack: "packed" }[name]),
      h("span", null, name === "recompute" ? "" : bytesText(n)), h("span", null, name === "recompute" ? bytesText(n) : "")));
  }

  function show() {
    const flips = flipsOf(state.plan), flipped = new Set(flips);
    const now = plan().held;
    const dropped = flips.filter((i) => D.states[now[i]] === "recompute"), back = flips.filter((i) => D.states[now[i]] === "keep");
    const some = (list) => list.slice(0, 3).map((i) => opText(heldMaker[i])).join("; ") + (list.length > 3 ? "; ..." : "");
    at("flips").textContent = D.plans.length === 1 ? "No plan that was found lowers the peak: nothing is dropped." : !state.plan ? "Nothing is dropped. Move the budget to see values flip."
      : `Against the next larger budget: ${dropped.length ? `${dropped.length} newly recomputed (${some(dropped)})` : "none newly recomputed"}${back.length ? `, ${back.length} kept again (${some(back)})` : ""}. They are marked in the tree.`;
    box.replaceChildren(h("div", { class: "line head" }, h("span", null, "module"), h("span", null, "kept | recomputed"), h("span", null, "kept"), h("span", null, "dropped")),
      h("ul", null, node(0, flipped), node(OUTSIDE, flipped)));
  }
  at("tree-flips").addEventListener("click", () => {
    for (const i of flipsOf(state.plan)) for (let m = D.ops.module[heldMaker[i]]; m >= 0 && m !== undefined; m = D.modules.parent[m]) open.add(m);
    show();
  });
  at("tree-close").addEventListener("click", () => {
    open.clear();
    open.add(0);
    show();
  });
  onChange(["plan"], show);
  show();
}
