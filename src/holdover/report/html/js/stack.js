// Weights beside activations: a fixed block, and a stack with one entry for each layer that keeps tensors.

function evaluate(coefficients, denominator, batch, seq) {
  let sum = 0;
  coefficients.forEach((row, i) => row.forEach((c, j) => (sum += c * batch ** i * seq ** j)));
  return sum / denominator;
}

function layersAt(sizes) {
  // What each layer holds at these sizes: from the recording itself, or from what the recordings at other sizes gave.
  const scaling = D.scaling;
  if (!scaling) return D.layers;
  if (scaling.recorded) {
    const found = scaling.recorded.find((r) => r.batch === sizes.batch && r.seq === sizes.seq) ?? scaling.recorded.find((r) => r.base) ?? scaling.recorded[0];
    return D.layers.map((l, i) => ({ ...l, saved_bytes: found.saved_bytes[i] }));
  }
  const batch = sizes.batch ?? 1, seq = sizes.seq ?? 1;
  const blocks = new Set(scaling.blocks);
  let left = sizes.depth ?? scaling.blocks.length;
  return D.layers.flatMap((l, i) => {
    if (blocks.has(i) && left-- <= 0) return [];
    return [{ ...l, saved_bytes: evaluate(scaling.layers[i], scaling.denominator, batch, seq) }];
  });
}

function fixedParts(layers) {
  // Weights, gradients and optimizer state; of another depth in proportion to the weights, which is what they follow.
  const weights = layers.reduce((sum, l) => sum + l.weights_bytes, 0);
  const all = D.layers.reduce((sum, l) => sum + l.weights_bytes, 0);
  if (weights === all) return [["weights", D.weights_bytes, "parameter"], ["gradients", D.gradients_bytes, "gradient"], ["optimizer", D.optimizer_bytes, "optimizer"]];
  const scale = (n) => Math.round((n * weights) / all);
  return [["weights", weights, "parameter"], ["gradients", scale(D.gradients_bytes), "gradient"], ["optimizer", scale(D.optimizer_bytes), "optimizer"]];
}

function groupsOf(layers) {
  // Neighbours of equal size and kind share a label.
  const groups = [];
  for (const layer of layers.filter((l) => l.saved_bytes > 0)) {
    const kind = layer.name.replace(/\d+/g, "#");
    const last = groups.at(-1);
    if (last && last.kind === kind && last.each === layer.saved_bytes && last.weights === layer.weights_bytes) last.layers.push(layer);
    else groups.push({ kind, each: layer.saved_bytes, weights: layer.weights_bytes, layers: [layer] });
  }
  return groups;
}

function groupText(g) {
  const [first, last] = [g.layers[0].name, g.layers.at(-1).name];
  return g.layers.length === 1 ? first : `${first} to ${last.split(".").at(-1)}, ${g.layers.length} alike`;
}

function startStack() {
  const section = at("stack");
  const chart = section.querySelector(".chart");
  const sum = (list) => list.reduce((total, l) => total + l.saved_bytes, 0);
  const base = Math.max(D.activations_bytes, D.weights_bytes + D.gradients_bytes + D.optimizer_bytes, 1);

  function draw(width) {
    const layers = layersAt(state.sizes);
    const fixed = fixedParts(layers).filter(([, n]) => n > 0);
    const total = sum(layers), fixedTotal = fixed.reduce((t, [, n]) => t + n, 0);
    let most = base * 1.15;
    while (Math.max(total, fixedTotal) > most) most *= 2; // the scale stays until the stack leaves it
    while (most > base * 1.2 && Math.max(total, fixedTotal) < most / 2.2) most /= 2;
    const height = 440, left = 72, top = 30, foot = height - 26;
    const y = (n) => foot - ((foot - top) * n) / most;
    const column = Math.min(150, (width - left) * 0.2), x1 = left + 8, x2 = x1 + column + 28;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label":
      `Weights, gradients and optimizer ${bytesText(fixedTotal)}; activations ${bytesText(total)}.` });
    for (const t of ticksOf(most)) {
      svg.append(s("line", { class: "grid", x1: left, x2: x2 + column, y1: y(t), y2: y(t) }),
        s("text", { class: "soft", x: left - 8, y: y(t) + 4, "text-anchor": "end" }, tickText(t)));
    }
    let up = 0;
    for (const [name, n, colour] of fixed) {
      svg.append(s("rect", { x: x1, width: column, y: y(up + n), height: Math.max(y(up) - y(up + n), 0.5), fill: `var(--${colour})` }));
      if (y(up) - y(up + n) > 15 && column > 90) svg.append(s("text", { x: x1 + 8, y: (y(up) + y(up + n)) / 2 + 4.5, style: "fill:var(--ground)" }, name));
      up += n;
    }
    const head = (x, n, text) => svg.append(
      s("text", { class: "strong halo", x, y: y(n) - 9 }, text));
    head(x1, fixedTotal, bytesText(fixedTotal));
    head(x2, total, bytesText(total));
    up = 0;
    let labelled = foot + 12;
    const x3 = x2 + column, room = Math.floor((width - x3 - 34) / 6.8);
    groupsOf(layers).forEach((g, k) => {
      const start = up;
      for (const layer of g.layers) {
        const high = y(up) - y(up + layer.saved_bytes);
        svg.append(s("rect", { x: x2, width: column, y: y(up + layer.saved_bytes), height: Math.max(high - (high > 3 ? 1 : 0), 0.25),
          fill: "var(--activation)", "fill-opacity": k % 2 ? 0.72 : 1, "data-layer": layer.name, "data-bytes": layer.saved_bytes },
        s("title", null, `${layer.name}: ${bytesText(layer.saved_bytes)}`)));
        up += layer.saved_bytes;
      }
      const middle = (y(start) + y(up)) / 2;
      const place = Math.min(middle + 4, labelled - 17);
      if (y(start) - y(up) > 5 && place > top) {
        const each = g.layers.length > 1 ? `${bytesText(g.each)} each` : bytesText(g.each);
        svg.append(s("path", { class: "axis", fill: "none", d: `M${x3 + 3} ${middle}L${x3 + 12} ${middle}L${x3 + 20} ${place - 4}` }),
          s("text", { x: x3 + 24, y: place }, `${groupText(g)}: ${each}`.slice(0, Math.max(room, 12))));
        labelled = place;
      }
    });
    svg.append(s("text", { class: "soft", x: x1, y: foot + 18 }, "fixed block"), s("text", { class: "soft", x: x2, y: foot + 18 }, "saved for backward"));
    svg.append(s("line", { class: "axis", x1: left, x2: x3, y1: foot, y2: foot }));
    chart.replaceChildren(svg);
    at("stack-total").textContent = bytesText(total);
    at("stack-total").dataset.bytes = total;
    at("stack-fixed").replaceChildren(...fixed.flatMap(([name, n, colour]) => [h("dt", null, h("span", { class: "swatch", style: `background:var(--${colour})` }), name), h("dd", { "data-bytes": n }, bytesText(n))]),
      h("dt", null, "fixed block"), h("dd", null, h("strong", { "data-bytes": fixedTotal }, bytesText(fixedTotal))));
    at("stack-ratio").textContent = fixedTotal ? `${two.format(total / fixedTotal)} times the fixed block` : "";
    refresh();
  }
  const again = drawn(chart, draw);
  const refresh = alternative(section, () => {
    const layers = layersAt(state.sizes);
    return table(["layer", "#weights", "#saved for backward"], layers.map((l) => [l.name, bytesCell(l.weights_bytes), bytesCell(l.saved_bytes)]), "Weights and activations by layer");
  });
  onChange(["sizes"], again);
  sizeControls(at("stack-controls"));
}

function sizeControls(box) {
  const scaling = D.scaling;
  if (!scaling) return;
  const sizes = Object.fromEntries(scaling.axes.map((a) => [a.name, a.base]));
  set({ sizes });
  if (scaling.recorded) {
    const select = h("select", { id: "size-recorded", onchange: () => set({ sizes: { ...scaling.recorded[select.value] } }) },
      scaling.recorded.map((r, i) => h("option", { value: i, selected: r.base ? "" : null }, scaling.axes.map((a) => `${a.label} ${whole.format(r[a.name])}`).join(", "))));
    box.append(h("div", { class: "control" }, h("label", { for: "size-recorded" }, "recorded sizes "), select));
  } else {
    for (const axis of scaling.axes) {
      const change = (event) => {
        const wanted = Math.round(Number(event.target.value));
        if (!Number.isFinite(wanted) || event.target.value === "") return;
        const value = Math.min(axis.most, Math.max(axis.least, wanted));
        range.value = value;
        if (event.type === "change" || event.target === range) number.value = value;
        set({ sizes: { ...state.sizes, [axis.name]: value } });
      };
      const range = h("input", { type: "range", min: axis.least, max: axis.most, step: axis.step, value: axis.base, "aria-label": axis.label, oninput: change });
      range.value = axis.base;
      const number = h("input", { type: "number", id: `size-${axis.name}`, min: axis.least, max: axis.most, step: axis.step, value: axis.base, oninput: change, onchange: change });
      box.append(h("div", { class: "control" }, h("label", { for: `size-${axis.name}` }, axis.label), h("div", { class: "row" }, range, number)));
    }
    box.append(h("button", { type: "button", onclick: () => {
      for (const a of scaling.axes) for (const i of box.querySelectorAll(`[aria-label="${a.label}"], #size-${a.name}`)) i.value = a.base;
      set({ sizes: { ...sizes } });
    } }, "back to the recorded size"));
  }
  for (const note of scaling.notes) box.append(h("p", { class: "small soft" }, note));
}
