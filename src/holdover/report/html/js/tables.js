// Tables: per module, per op, per tensor; each column sorts.

function startTables() {
  const box = at("table");
  const views = { modules: moduleRows, ops: opRows, tensors: tensorRows };
  let view = "modules", column = null, falling = true, all = false;
  const LIMIT = 60;

  function choiceOf(i) {
    return D.plans.length ? D.states[plan().held[i]] : "keep";
  }

  function replaysByOp() {
    const counts = new Map();
    if (D.plans.length) running(plan().recomputed).forEach((position, k) => counts.set(position, plan().replays[k]));
    return counts;
  }

  function moduleRows() {
    const rows = new Map();
    const row = (m) => rows.get(m) ?? rows.set(m, { m, weights: m === OUTSIDE ? 0 : D.modules.weights_bytes[m], saved: 0, dropped: 0, packed: 0, replays: 0, seconds: 0 }).get(m);
    D.modules.weights_bytes.forEach((n, m) => n && row(m));
    heldMaker.forEach((maker, i) => (row(D.ops.module[maker]).saved += D.held.bytes[i]));
    if (D.plans.length) for (const [m, , dropped, packed, replays, seconds] of plan().modules) Object.assign(row(m), { dropped, packed, replays, seconds });
    return {
      heads: ["module", "class", "#weights", "#saved", "#dropped", "#replays", "#replays take"],
      rows: [...rows.values()].sort((p, q) => p.m - q.m).map((r) => [moduleName(r.m), r.m === OUTSIDE ? "" : S[D.modules.kind[r.m]], { b: r.weights }, { b: r.saved }, { b: r.dropped }, { n: r.replays }, { t: r.seconds }]),
      total: (rows) => ["together", "", ...[2, 3, 4].map((k) => ({ b: rows.reduce((t, r) => t + r[k].b, 0) })), { n: rows.reduce((t, r) => t + r[5].n, 0) }, { t: rows.reduce((t, r) => t + r[6].t, 0) }],
    };
  }

  function opRows() {
    const rows = new Map(), replays = replaysByOp();
    heldMaker.forEach((maker, i) => {
      const name = S[D.ops.name[maker]];
      const r = rows.get(name) ?? rows.set(name, { name, count: 0, saved: 0, dropped: 0, seconds: 0, replayed: 0 }).get(name);
      r.count += 1;
      r.saved += D.held.bytes[i];
      r.seconds += D.held.seconds[i] ?? 0;
      if (choiceOf(i) === "recompute") r.dropped += D.held.bytes[i];
    });
    for (const [position, n] of replays) if (rows.has(S[D.ops.name[position]])) rows.get(S[D.ops.name[position]]).replayed += n;
    return {
      heads: ["op", "#tensors saved", "#saved", "#dropped", "#replays", "#to replay all"],
      rows: [...rows.values()].map((r) => [r.name, { n: r.count }, { b: r.saved }, { b: r.dropped }, { n: r.replayed }, { t: r.seconds }]),
      total: (rows) => ["together", { n: rows.reduce((t, r) => t + r[1].n, 0) }, ...[2, 3].map((k) => ({ b: rows.reduce((t, r) => t + r[k].b, 0) })), { n: rows.reduce((t, r) => t + r[4].n, 0) }, { t: rows.reduce((t, r) => t + r[5].t, 0) }],
    };
  }

  function tensorRows() {
    const keys = Object.keys(D.reasons);
    return {
      heads: ["tensor", "shape", "#saved", "#its replay", "choice and why"],
      rows: heldMaker.map((maker, i) => [{ s: heldText(i), i }, S[D.held.shape[i]], { b: D.held.bytes[i] }, { t: D.held.seconds[i] ?? 0, none: D.held.seconds[i] === null },
        { c: choiceOf(i), s: D.plans.length ? D.reasons[keys[plan().reasons[i]]] : D.reasons["no plan"] }]),
      total: (rows) => ["together", "", { b: rows.reduce((t, r) => t + r[2].b, 0) }, "", ""],
    };
  }

  const valueOf = (c) => (typeof c === "string" ? c : c.b ?? c.n ?? c.t ?? c.s);
  function cell(c) {
    if (typeof c === "string") return h("td", null, c);
    if ("b" in c) return bytesCell(c.b);
    if ("n" in c) return h("td", { class: "n" }, c.n ? whole.format(c.n) : "");
    if ("t" in c) return h("td", { class: "n" }, c.none ? "not possible" : c.t ? secondsText(c.t) : "");
    if ("c" in c) return h("td", null, h("span", { class: `state ${c.c}` }), c.s);
    return h("td", null, h("button", { type: "button", class: "link", onclick: () => { set({ held: c.i }); at("life").scrollIntoView(); } }, c.s));
  }

  function show() {
    const { heads, rows, total } = views[view]();
    if (column !== null) rows.sort((p, q) => {
      const [a, b] = [valueOf(p[column]), valueOf(q[column])];
      return (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b) * (falling ? -1 : 1);
    });
    const shown = all ? rows : rows.slice(0, LIMIT);
    const head = heads.map((t, k) => {
      const name = t.replace(/^#/, "");
      return h("th", { scope: "col", class: t.startsWith("#") ? "n" : null, "aria-sort": k === column ? (falling ? "descending" : "ascending") : null },
        h("button", { type: "button", "data-column": k, onclick: () => {
          falling = k === column ? !falling : t.startsWith("#");
          column = k;
          show();
          box.querySelector(`[data-column="${k}"]`).focus();
        } }, name, k === column ? (falling ? " ↓" : " ↑") : ""));
    });
    box.replaceChildren(h("table", null, h("caption", { class: "visually-hidden" }, `Per ${view.replace(/s$/, "")}`), h("thead", null, h("tr", null, head)),
      h("tbody", null, shown.map((r) => h("tr", null, r.map(cell)))), h("tfoot", null, h("tr", null, total(rows).map((c) => { const made = cell(c); made.style.fontWeight = 600; return made; })))));
    at("table-more").hidden = rows.length <= LIMIT;
    at("table-more").textContent = all ? `show the first ${LIMIT}` : `show all ${whole.format(rows.length)}`;
  }

  for (const input of document.querySelectorAll("input[name=view]")) input.addEventListener("change", () => {
    view = input.value;
    column = null;
    show();
  });
  at("table-more").addEventListener("click", () => {
    all = !all;
    show();
  });
  onChange(["plan"], show);
  show();
}
