"use strict";
// Every text reaches the page by textContent; nothing here makes markup of a string.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const margins = data.kind === "margins";
  const at = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const state = { text: 0, layer: null, view: null, quantity: data.quantities[0].name, k: data.k, active: null };
  let redraws = [];

  // ---- small tools
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const draw = (tag, attributes = {}, text = null) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    return node;
  };
  const number = (value, digits = 3, signed = false) => {
    if (value === null || value === undefined) return "–";
    let shown = value.toFixed(digits);
    if (value !== 0 && Number(shown) === 0) shown = value.toExponential(1);
    if (Number(shown) === 0) return shown.replace("-", "");
    return (signed && value > 0 ? "+" : "") + shown.replaceAll("-", "−");
  };
  const margin = (p, i, digits = 3) => (p.margin[i] === null && p.ranked[i] ? "−∞" : number(p.margin[i], digits));
  const figure = (quantity, value, signed = false) =>
    value === null || value === undefined ? "–"
      : quantity.percent ? `${number(100 * value, quantity.digits)} %` : number(value, quantity.digits, signed);
  const alone = (row) => row.s.replaceAll(" ", "␣");

  // ---- what is chosen
  const panels = () => data.panels.filter((p) => p.text === state.text);
  const panel = () => panels().find((p) => p.layer === state.layer && p.view === state.view);
  const rows = () => data.texts[state.text].rows;
  const quantity = () => data.quantities.find((q) => q.name === state.quantity);
  const has = (p, name) => p[name].some((v) => v !== null);
  const ranking = (p) => {
    if (!margins) return p.rank.map((rank, i) => [rank, i]).filter(([rank]) => rank).sort((a, b) => a[0] - b[0]).map(([, i]) => i);
    return p.order.slice(0, state.k);
  };

  // ---- colours: bands come with the data, one digit a token; "-" is not coloured
  const letter = (q) => (q.weak === "diverging" ? "d" : "m");

  // ---- the text
  const drawLegend = (q) => {
    const box = at("legend"), [left, right] = panel().limits[q.name];
    const bands = make("span", { class: "bands", "aria-hidden": "true" });
    for (let i = 0; i < data.alphas.length; i++) bands.append(make("i", { class: letter(q) + i }));
    const ends = make("span", {}, figure(q, left, q.weak === "diverging"), bands, figure(q, right, q.weak === "diverging"));
    ends.setAttribute("title", `${q.label}: stronger is ${q.weak === "high" ? "larger" : q.weak === "low" ? "smaller" : "further from zero"}`);
    const sample = (classes, letters, words) => make("span", {}, make("span", { class: `t ${classes}` }, letters), words);
    box.replaceChildren(ends);
    const supports = sample("support", "a", margins ? "support token" : "support token after");
    supports.firstChild.append(make("span", { class: "rank" }, "1"));
    box.append(supports);
    if (!margins) box.append(sample("was-support", "a", "before only"));
    const p = panel();
    if (p.sign.some((sign) => sign < 0)) box.append(sample("negative", "a", "negative determinant"));
    if (p.ranked.some((ranked, i) => !ranked && !(rows()[i].c === "deleted"))) box.append(sample("unranked", "a", "not ranked"));
    if (!margins) box.append(make("span", {}, make("span", { class: "t d3" }, "a"), `practically unchanged, at most ${number(data.floor, 3)}`), sample("first", "a", "first positions: nearly always support tokens"));
    for (const kind of ["replaced", "inserted", "deleted"])
      if (rows().some((row) => row.c === kind)) box.append(sample(kind, "a", kind));
  };

  const say = (p, i) => {
    const parts = [`${alone(rows()[i])}, position ${rows()[i].p}, log margin ${margin(p, i)}`];
    if (!margins) parts.push(`change ${number(p.difference[i], 3, true)}`);
    if (p.sign[i] < 0) parts.push("negative determinant");
    return parts.join(", ");
  };

  const drawText = () => {
    const p = panel(), q = quantity();
    const order = ranking(p), list = at("tokens"), nodes = document.createDocumentFragment();
    rows().forEach((row, i) => {
      const classes = ["t"];
      const digit = p.bands[q.name][i];
      if (digit !== "-") classes.push(letter(q) + digit);
      if (margins && !p.ranked[i]) classes.push("unranked");
      if (p.sign[i] < 0) classes.push("negative");
      if (row.c) classes.push(row.c);
      if (row.f) classes.push("first");
      const rank = order.indexOf(i);
      if (rank >= 0) classes.push("support");
      else if (!margins && p.rankBefore[i]) classes.push("was-support");
      const node = make("span", {
        class: classes.join(" "), id: `t${i}`, role: "option", tabindex: "-1", "aria-selected": "false", "aria-label": say(p, i),
      }, row.s);
      if (rank >= 0) node.append(make("span", { class: "rank" }, String(rank + 1)));
      nodes.append(node);
      for (let b = 0; b < (row.b || 0); b++) nodes.append(document.createTextNode("\n"));
    });
    list.replaceChildren(nodes);
    list.classList.toggle("long", rows().length > 1500);
    drawLegend(q);
    const first = state.active ?? order[0] ?? 0;
    at(`t${first}`)?.setAttribute("tabindex", "0");
  };

  // ---- figures of one token
  const activate = (i, { focus = false, scroll = false } = {}) => {
    const before = state.active !== null ? at(`t${state.active}`) : null;
    if (before) { before.classList.remove("active"); before.setAttribute("aria-selected", "false"); }
    for (const node of at("tokens").querySelectorAll('[tabindex="0"]')) node.setAttribute("tabindex", "-1");
    state.active = i;
    const node = at(`t${i}`);
    node.classList.add("active");
    node.setAttribute("aria-selected", "true");
    node.setAttribute("tabindex", "0");
    if (focus) node.focus({ preventScroll: !scroll });
    if (scroll) node.scrollIntoView({ block: "center", behavior: "auto" });
    drawDetails();
    for (const redraw of redraws) redraw();
  };

  const drawDetails = () => {
    const box = at("details"), p = panel(), i = state.active;
    if (i === null || i >= rows().length) {
      box.replaceChildren(make("p", { class: "hint" }, "Point at a token, tap it, or move with the arrow keys to see its figures."));
      return;
    }
    const row = rows()[i], list = make("dl");
    const add = (name, value) => list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    const sign = (value) => (value === null ? "–" : value < 0 ? "− negative" : value > 0 ? "+ positive" : "0 singular");
    const rank = ranking(p).indexOf(i);
    if (margins) {
      add("log margin", margin(p, i, 4));
      add("σ min", number(p.sigma[i], 4));
      add("sign", sign(p.sign[i]));
      add("support rank", rank >= 0 ? String(rank + 1) : p.ranked[i] ? "–" : "not ranked");
      add("gradient share", p.share[i] === null ? "–" : `${number(100 * p.share[i], 2)} %`);
      add("coupling", p.coupling[i] === null ? "–" : p.coupling[i] > 0 ? "attractive" : p.coupling[i] < 0 ? "repulsive" : "none");
      add("surprisal", p.surprise[i] === null ? "–" : `${number(p.surprise[i], 2)} nats`);
    } else {
      add("change", number(p.difference[i], 4, true));
      add(`before`, number(p.before[i], 4));
      add(`after`, number(p.margin[i], 4));
      add("σ min before", number(p.sigmaBefore[i], 4));
      add("σ min after", number(p.sigma[i], 4));
      add("sign before", sign(p.signBefore[i]));
      add("sign after", row.c === "deleted" ? "–" : sign(p.sign[i]));
      add("rank before", p.rankBefore[i] ? String(p.rankBefore[i]) : "–");
      add("rank after", p.rank[i] ? String(p.rank[i]) : "–");
    }
    const where = `position ${row.p}` + (row.i === null ? "" : `, id ${row.i}`) + (row.was ? `, was ${row.was.replaceAll(" ", "␣")}` : row.c ? `, ${row.c}` : "");
    const head = make("bdi", { class: "head" }, alone(row));
    const close = make("button", { type: "button", class: "close", "aria-label": "Close the figures of this token" }, "×");
    close.addEventListener("click", () => { state.active = null; show(); });
    box.replaceChildren(close, head, make("p", { class: "where" }, where), list);
    if (margins && p.heads[i]) box.append(headsOf(p.heads[i]));
  };

  const headsOf = (heads) => {
    const box = make("div", { class: "heads" }, make("p", {}, "log|det| of each head alone (diagnostic, not a sum)"));
    const width = 260, height = 44, low = Math.min(0, ...heads), high = Math.max(0, ...heads), span = high - low || 1;
    const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
      "aria-label": heads.map((value, h) => `head ${h}: ${number(value)}`).join(", ") });
    const step = width / heads.length, y = (value) => 2 + (height - 4) * (high - value) / span;
    heads.forEach((value, h) => {
      const bar = draw("rect", { x: h * step + step * 0.12, width: Math.max(1, step * 0.76), y: Math.min(y(0), y(value)), height: Math.max(1, Math.abs(y(value) - y(0))), class: value < 0 ? "folded" : "bar" });
      bar.append(draw("title", {}, `head ${h}: ${number(value)} nats`));
      picture.append(bar);
    });
    picture.append(draw("line", { x1: 0, x2: width, y1: y(0), y2: y(0), class: "axis" }));
    box.append(picture);
    return box;
  };

  // ---- ranking
  const context = (i) => {
    const join = (list) => list.map((row) => alone(row)).join("");
    return [join(rows().slice(Math.max(0, i - 3), i)), join(rows().slice(i + 1, i + 4))];
  };
  const tokenButton = (i) => {
    const [before, after] = context(i);
    const button = make("button", { type: "button" }, make("span", { class: "aside" }, make("bdi", {}, before)),
      make("b", {}, make("bdi", {}, alone(rows()[i]))), make("span", { class: "aside" }, make("bdi", {}, after)));
    if (rows()[i].f) button.append(make("span", { class: "aside" }, " · first positions"));
    button.addEventListener("click", () => activate(i, { focus: true, scroll: true }));
    return button;
  };
  const tableOf = (caption, heads, lines) => {
    const table = make("table", { class: "figures" });
    if (caption) table.append(make("caption", {}, caption));
    const cell = (tag, [value, classes]) => make(tag, classes ? { class: classes } : {}, value);
    table.append(make("thead", {}, make("tr", {}, ...heads.map((head) => { const th = cell("th", head); th.setAttribute("scope", "col"); return th; }))));
    table.append(make("tbody", {}, ...lines.map((line) => make("tr", {}, ...line.map((value) => cell("td", value))))));
    return table;
  };
  const drawRanking = () => {
    const p = panel();
    if (margins) {
      const heads = [["", "n"], ["token in its context"], ["position", "n optional"], ["log margin", "n"], ["σ min", "n"], ["sign", "n optional"], ["gradient share", "n optional"], ["surprisal", "n optional"]];
      const lines = ranking(p).map((i, rank) => [[String(rank + 1), "n"], [tokenButton(i), "context"], [String(rows()[i].p), "n optional"], [margin(p, i), "n"],
        [number(p.sigma[i], 4), "n"], [p.sign[i] < 0 ? "−" : p.sign[i] > 0 ? "+" : "0", "n optional"], [p.share[i] === null ? "–" : `${number(100 * p.share[i], 1)} %`, "n optional"], [number(p.surprise[i], 2), "n optional"]]);
      at("ranking").replaceChildren(tableOf("", heads, lines));
      return;
    }
    const lines = (chosen) => chosen.map((i) => [[tokenButton(i), "context"], [number(p.before[i]), "n"], [number(p.margin[i]), "n"], [Math.abs(p.difference[i] ?? Infinity) <= data.floor ? "unchanged" : number(p.difference[i], 3, true), "n"]]);
    const heads = [["token in its context"], ["before", "n"], ["after", "n"], ["change", "n"]];
    const places = p.rank.map((_, i) => i);
    const gained = places.filter((i) => p.rank[i] && !p.rankBefore[i]).sort((a, b) => p.rank[a] - p.rank[b]);
    const lost = places.filter((i) => p.rankBefore[i] && !p.rank[i]).sort((a, b) => p.rankBefore[a] - p.rankBefore[b]);
    const moved = places.filter((i) => Math.abs(p.difference[i] ?? 0) > data.floor).sort((a, b) => Math.abs(p.difference[b]) - Math.abs(p.difference[a])).slice(0, 5);
    const flipped = places.filter((i) => p.signBefore[i] !== null && p.margin[i] !== null && p.signBefore[i] !== p.sign[i]).slice(0, 8);
    const box = make("div", { class: "columns" }), still = places.filter((i) => p.difference[i] !== null && Math.abs(p.difference[i]) <= data.floor).length;
    const every = places.filter((i) => p.difference[i] !== null).length;
    const words = still === every ? "All tokens are practically unchanged" : `${still} of ${every} tokens are practically unchanged`;
    const says = make("p", { class: "hint", id: "unchanged" }, `${words}: their log margin changed by at most ${number(data.floor, 3)} nats, which the text does not colour.`);
    for (const [name, chosen] of [["Now a support token", gained], ["No longer a support token", lost], ["Changed most", moved], ["Changed the sign of the determinant", flipped]])
      box.append(chosen.length ? tableOf(name, heads, lines(chosen)) : make("p", { class: "hint" }, `${name}: none.`));
    at("ranking").replaceChildren(says, box);
  };

  // ---- plots
  const ticks = (low, high, count) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || power;
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return found.map((value) => [value, number(value, digits)]);
  };
  const frame = (box, height, left = 46) => {
    const width = Math.max(260, box.clientWidth), right = 14, top = 22, bottom = 24;
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    return { svg, left, right: width - right, top, bottom: height - bottom, width, height };
  };
  const horizontal = (f, low, high) => {
    for (const [value, shown] of ticks(low, high, 4)) {
      const y = f.bottom - (f.bottom - f.top) * (value - low) / (high - low);
      f.svg.append(draw("line", { x1: f.left, x2: f.right, y1: y, y2: y, class: value === 0 ? "zero" : "axis" }), draw("text", { x: f.left - 6, y: y + 4, "text-anchor": "end" }, shown));
    }
  };

  const drawAlong = () => {
    const p = panel(), box = at("along"), f = frame(box, 230), count = rows().length;
    const series = margins ? [p.margin] : [p.before, p.margin];
    const all = series.flatMap((values) => values.filter((v) => v !== null));
    let low = Math.min(0, ...all), high = Math.max(0, ...all);
    // Below the lowest point there is room for its label.
    const span = high - low || 1; low -= span * 0.2; high += span * 0.06;
    const x = (i) => (count === 1 ? (f.left + f.right) / 2 : f.left + (f.right - f.left) * i / (count - 1));
    const y = (value) => f.bottom - (f.bottom - f.top) * (value - low) / (high - low);
    horizontal(f, low, high);
    f.svg.append(draw("text", { x: f.left, y: 12 }, "nats"));
    for (const [value, shown] of ticks(0, Math.max(1, count - 1), Math.min(8, Math.max(1, count - 1)))) if (Number.isInteger(value) && value < count)
      f.svg.append(draw("text", { x: x(value), y: f.height - 6, "text-anchor": "middle" }, shown));
    series.forEach((values, which) => {
      let path = "", pen = "M";
      values.forEach((value, i) => { if (value === null) { pen = "M"; return; } path += `${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}`; pen = "L"; });
      f.svg.append(draw("path", { d: path, class: which === series.length - 1 ? "line" : "line before" }));
    });
    const order = ranking(p);
    p.sign.forEach((sign, i) => { if (sign < 0 && p.margin[i] !== null && !order.includes(i)) f.svg.append(draw("circle", { cx: x(i), cy: y(p.margin[i]), r: 3, class: "ring" })); });
    const taken = [];
    order.forEach((i, rank) => {
      if (p.margin[i] === null) return;
      f.svg.append(draw("circle", { cx: x(i), cy: y(p.margin[i]), r: 4.5, class: p.sign[i] < 0 ? "ring" : "dot" }));
      if (rank >= 8) return;
      const shown = alone(rows()[i]), label = [...shown].length > 12 ? `${[...shown].slice(0, 11).join("")}…` : shown;
      const half = label.length * 3.9 + 4, cx = Math.min(f.right - half, Math.max(f.left + half, x(i)));
      const cy = y(p.margin[i]) + 18;
      if (taken.some(([l, r, ty]) => cx - half < r && cx + half > l && Math.abs(ty - cy) < 15)) return;
      taken.push([cx - half, cx + half, cy]);
      f.svg.append(draw("text", { x: cx, y: cy, "text-anchor": "middle", class: "label halo" }, label));
    });
    const cursor = draw("line", { y1: f.top, y2: f.bottom, class: "cursor", visibility: "hidden" });
    f.svg.append(cursor);
    const mark = () => {
      const shown = state.active !== null && state.active < count;
      cursor.setAttribute("visibility", shown ? "visible" : "hidden");
      if (shown) { cursor.setAttribute("x1", x(state.active)); cursor.setAttribute("x2", x(state.active)); }
    };
    const nearest = (event) => {
      const place = (event.clientX - f.svg.getBoundingClientRect().left) * (f.width / f.svg.getBoundingClientRect().width);
      return Math.min(count - 1, Math.max(0, Math.round((place - f.left) / ((f.right - f.left) / Math.max(1, count - 1)))));
    };
    f.svg.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") activate(nearest(event)); });
    f.svg.addEventListener("click", (event) => activate(nearest(event)));
    mark(); redraws.push(mark);
    const weakest = order[0];
    f.svg.setAttribute("role", "img");
    f.svg.setAttribute("aria-label", weakest === undefined ? "No token is ranked." : `Log margin of ${count} tokens; the smallest is ${margin(p, weakest)} at position ${rows()[weakest].p}.`);
    at("along-says").textContent = margins
      ? "Marked: support tokens. Rings: negative determinant, where the map has folded. Point at the line to read a token."
      : `Dashed: ${data.names[0]}. Full line: ${data.names[1]}. Marked: support tokens after. Point at a line to read a token.`;
    box.replaceChildren(f.svg);
  };

  const drawSpread = () => {
    const p = panel(), box = at("spread"), f = frame(box, 210);
    const name = margins ? "margin" : "difference";
    const values = p[name].map((value, i) => [value, p.sign[i]]).filter(([value], i) => value !== null && (margins ? p.ranked[i] : true));
    if (!values.length) { box.replaceChildren(make("p", { class: "hint" }, "Nothing to count.")); return; }
    const only = values.map(([value]) => value);
    let low = Math.min(...only), high = Math.max(...only);
    if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
    const bins = Math.min(30, Math.max(8, Math.ceil(Math.sqrt(values.length) * 1.6)));
    const counts = Array.from({ length: bins }, () => [0, 0]);
    for (const [value, sign] of values) counts[Math.min(bins - 1, Math.floor(bins * (value - low) / (high - low)))][sign < 0 ? 1 : 0] += 1;
    const most = Math.max(...counts.map(([a, b]) => a + b));
    const x = (value) => f.left + (f.right - f.left) * (value - low) / (high - low), height = (n) => (f.bottom - f.top) * n / most;
    const defs = draw("defs"), pattern = draw("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(draw("rect", { width: 6, height: 6, class: "folded" }), draw("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatched" }));
    defs.append(pattern); f.svg.append(defs);
    for (const [value, shown] of ticks(0, most, 4)) if (Number.isInteger(value)) {
      const y = f.bottom - height(value);
      f.svg.append(draw("line", { x1: f.left, x2: f.right, y1: y, y2: y, class: "axis" }), draw("text", { x: f.left - 6, y: y + 4, "text-anchor": "end" }, shown));
    }
    counts.forEach(([positive, negative], bin) => {
      const left = x(low + (high - low) * bin / bins) + 0.5, width = Math.max(1, (f.right - f.left) / bins - 1);
      if (positive) f.svg.append(draw("rect", { x: left, width, y: f.bottom - height(positive), height: height(positive), class: "bar" }));
      if (negative) f.svg.append(draw("rect", { x: left, width, y: f.bottom - height(positive + negative), height: height(negative), fill: "url(#hatch)" }));
    });
    for (const [value, shown] of ticks(low, high, 5)) f.svg.append(draw("text", { x: x(value), y: f.height - 6, "text-anchor": "middle" }, shown));
    f.svg.append(draw("text", { x: f.left, y: 12 }, "tokens"));
    const negative = values.filter(([, sign]) => sign < 0).length, mean = only.reduce((a, b) => a + b, 0) / only.length;
    const said = `${values.length} tokens, mean ${number(mean, 3, !margins)} nats` + (margins ? `, ${negative} with a negative determinant${negative ? " (hatched)" : ""}.` : ".");
    at("spread-says").textContent = said;
    f.svg.setAttribute("role", "img"); f.svg.setAttribute("aria-label", said);
    box.replaceChildren(f.svg);
  };

  const drawMap = () => {
    const box = at("map"), count = rows().length;
    const mine = panels().filter((p) => p.view === state.view).sort((a, b) => a.layer - b.layer);
    at("map-box").hidden = mine.length < 2;
    if (mine.length < 2) return;
    const left = 46, width = Math.max(260, box.clientWidth), cell = Math.min(26, Math.max(9, 190 / mine.length)), height = cell * mine.length + 24;
    const ratio = window.devicePixelRatio || 1, canvas = make("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio), role: "img" });
    canvas.width = Math.round(width * ratio);
    const style = getComputedStyle(document.documentElement), colour = (variable) => style.getPropertyValue(variable).trim();
    const fill = (b) => `rgba(${colour(margins || b > 3 ? "--weak" : "--strong")}, ${data.alphas[b]})`;
    const step = (width - left) / count;
    const paint = () => {
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
      const every = Math.ceil(14 / cell);
      mine.forEach((p, r) => {
        [...p.map].forEach((digit, i) => {
          if (digit === "-") return;
          pen.fillStyle = fill(Number(digit));
          pen.fillRect(left + i * step, r * cell, Math.max(step - (step > 4 ? 1 : 0), 0.5), cell - 1);
          if (p.sign[i] < 0 && step >= 5) { pen.fillStyle = colour("--ink"); pen.fillRect(left + (i + 0.5) * step - 1.5, (r + 0.5) * cell - 2, 3, 3); }
        });
        pen.fillStyle = colour(p.layer === state.layer ? "--ink" : "--muted");
        pen.textAlign = "right";
        if (r % every === 0 || p.layer === state.layer) pen.fillText(String(p.layer), left - 8, (r + 0.5) * cell);
        if (p.layer === state.layer) { pen.strokeStyle = colour("--ink"); pen.lineWidth = 1.5; pen.strokeRect(left - 1, r * cell + 0.25, width - left, cell - 1.5); }
      });
      if (state.active !== null && state.active < count) { pen.strokeStyle = colour("--accent"); pen.lineWidth = 2; pen.strokeRect(left + state.active * step, 0, Math.max(step, 2), cell * mine.length); }
      pen.fillStyle = colour("--muted"); pen.textAlign = "center";
      for (const [value, shown] of ticks(0, Math.max(1, count - 1), Math.min(6, Math.max(1, count - 1)))) if (Number.isInteger(value) && value < count) pen.fillText(shown, left + (value + 0.5) * step, height - 9);
      pen.textAlign = "left";
    };
    const where = (event) => {
      const bounds = canvas.getBoundingClientRect();
      const i = Math.floor(((event.clientX - bounds.left) * width / bounds.width - left) / step), r = Math.floor((event.clientY - bounds.top) * height / bounds.height / cell);
      return i >= 0 && i < count && r >= 0 && r < mine.length ? [i, mine[r].layer] : null;
    };
    canvas.addEventListener("pointermove", (event) => { const found = where(event); if (event.pointerType === "mouse" && found) activate(found[0]); });
    canvas.addEventListener("click", (event) => { const found = where(event); if (found) { state.layer = found[1]; state.active = found[0]; at("layer").value = String(found[1]); show(); } });
    canvas.setAttribute("aria-label", `Log margins of ${mine.length} layers at ${count} positions; layer ${state.layer} is shown.`);
    at("map-says").textContent = margins
      ? `Stronger is a smaller log margin, ${number(panel().mapLimits[0], 2)} to ${number(panel().mapLimits[1], 2)} over all layers; a point marks a negative determinant. Click to go to a layer.`
      : `Orange: the margin shrank; blue: it grew. Each layer has its own scale, here up to ${number(panel().mapLimits[0], 2)} nats. Click to go to a layer.`;
    box.replaceChildren(canvas);
    paint(); redraws.push(paint);
  };

  // ---- everything
  const charts = () => { redraws = []; drawAlong(); drawMap(); drawSpread(); };
  const show = () => {
    if (state.active !== null && state.active >= rows().length) state.active = null;
    drawText(); drawRanking(); charts();
    const layers = [...at("layer").options].map((option) => Number(option.value)), place = layers.indexOf(state.layer);
    at("previous").disabled = place <= 0; at("next").disabled = place >= layers.length - 1;
    if (state.active !== null) activate(state.active); else drawDetails();
  };
  const options = (id, pairs, chosen) => {
    at(id).replaceChildren(...pairs.map(([value, words]) => make("option", { value }, words)));
    at(id).value = String(chosen);
  };
  const choose = () => {
    const mine = panels(), layers = [...new Set(mine.map((p) => p.layer))].sort((a, b) => a - b);
    if (!layers.includes(state.layer)) state.layer = mine[0].layer;
    const views = [...new Set(mine.filter((p) => p.layer === state.layer).map((p) => p.view))];
    if (!views.includes(state.view)) state.view = views[0];
    options("layer", layers.map((layer) => [layer, String(layer)]), state.layer);
    const words = { noise: "noise: x − μ(x)", block: "block: x + μ(x)" };
    options("view", views.map((view) => [view, words[view] || view]), state.view);
    const known = data.quantities.filter((q) => has(panel(), q.name));
    if (!known.some((q) => q.name === state.quantity)) state.quantity = known[0].name;
    options("quantity", known.map((q) => [q.name, q.label]), state.quantity);
  };
  const listen = (id, read) => at(id)?.addEventListener("change", () => { read(at(id).value); choose(); show(); });

  options("text", data.texts.map((text, i) => [i, text.name]), 0);
  listen("text", (value) => { state.text = Number(value); state.active = null; });
  listen("layer", (value) => { state.layer = Number(value); });
  listen("view", (value) => { state.view = value; });
  listen("quantity", (value) => { state.quantity = value; });
  listen("k", (value) => { state.k = Math.min(99, Math.max(1, Math.round(Number(value) || 0))); at("k").value = state.k; });
  if (at("k")) at("k").value = state.k;
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  const step = (by) => {
    const select = at("layer"), place = select.selectedIndex + by;
    if (place >= 0 && place < select.options.length) { select.selectedIndex = place; select.dispatchEvent(new Event("change")); }
  };
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  const list = at("tokens");
  const placeOf = (event) => { const node = event.target.closest("[role=option]"); return node ? Number(node.id.slice(1)) : null; };
  list.addEventListener("pointerover", (event) => { const i = placeOf(event); if (i !== null && event.pointerType === "mouse" && i !== state.active) activate(i); });
  list.addEventListener("click", (event) => { const i = placeOf(event); if (i !== null) activate(i, { focus: true }); });
  // Inside of a frame the click that follows a tap may miss the token, or hit what the tap has brought up.
  list.addEventListener("touchend", (event) => { const i = placeOf(event); if (i !== null && event.cancelable) { event.preventDefault(); activate(i, { focus: true }); } });
  list.addEventListener("focusin", (event) => { const i = placeOf(event); if (i !== null && i !== state.active) activate(i); });
  list.addEventListener("keydown", (event) => {
    const last = rows().length - 1, now = state.active ?? 0;
    const to = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    activate(Math.min(last, Math.max(0, to)), { focus: true });
    at(`t${state.active}`).scrollIntoView({ block: "nearest" });
  });
  choose(); show();
  document.documentElement.classList.add("ready");
  let width = at("along").clientWidth;
  new ResizeObserver(() => { if (at("along").clientWidth !== width) { width = at("along").clientWidth; charts(); } }).observe(at("along"));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
})();
