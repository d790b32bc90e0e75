// Heat map, growth curves with R(n) beside them, and sigma between its bounds.

PARTS.heat = (part, study) => {
  const { lengths, layers, columns, cells } = study.heat;
  let at = lengths.length - 1;
  const { label, select } = choice("length n", lengths.map(String), (i) => { at = i; draw(); });
  select.value = String(at);
  part.append(element("div", { className: "controls" }, label));
  const values = STUDIES.flatMap((s) => s.heat.cells.flat(2)).filter((c) => c && c[0] > 0).map((c) => c[0]);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), 0), log = high > 50 * low;
  const scaled = (x) => (log ? Math.log10(x) : x);
  const draw = chart(part, "Heat map of σ over layers and heads; the table at the end lists the same numbers.", (t) => {
    const hover = (cell, layer, column) => cell && [
      `<b>${plain(layer)}, ${plain(column)}</b>`, `σ = ${number(cell[0])}, the median of ${cell[5]} sample${cell[5] > 1 ? "s" : ""}`,
      `known to lie in ${interval(cell[1], cell[2])}`, `over samples ${interval(cell[3], cell[4])}`, `n = ${lengths[at]}`].join("<br>");
    const table = cells[at], few = columns.length <= (isNarrow() ? 8 : 24) && layers.length <= 40;
    const trace = {
      type: "heatmap", x: columns.map(plain), y: layers.map(plain), xgap: 1, ygap: 1, colorscale: colorscale(),
      z: table.map((line) => line.map((cell) => (cell && cell[0] > 0 ? scaled(cell[0]) : null))),
      zmin: log ? Math.log10(low) : 0, zmax: scaled(high), hoverinfo: "text", hoverongaps: false,
      hovertext: table.map((line, i) => line.map((cell, j) => hover(cell, layers[i], columns[j]) || "")),
      text: few ? table.map((line) => line.map((cell) => (cell ? number(cell[0], 3) : ""))) : undefined,
      texttemplate: few ? "%{text}" : undefined,
      colorbar: { title: { text: log ? "log₁₀ σ" : "σ", side: "right" }, thickness: 14, outlinewidth: 0, len: 1 },
    };
    const height = Math.min(900, Math.max(220, 30 * layers.length + 130));
    const title = { text: `σ at n = ${lengths[at]}`, font: { size: 14 }, x: 0, xanchor: "left" };
    return { traces: [trace], layout: { height, title, yaxis: axis(t, { autorange: "reversed", showgrid: false }), xaxis: headAxis(t, columns) } };
  });
  draw();
};

// Heads are labelled by number only, so that all of them fit on a phone.
function headAxis(t, columns) {
  const ticktext = columns.map((name) => plain(name.replace(/^head /, "")));
  return axis(t, { showgrid: false, type: "category", tickmode: "array", tickvals: columns.map(plain), ticktext, title: { text: columns[0].startsWith("head ") ? "head" : "map" } });
}

const below = () => ({ orientation: "h", yref: "container", y: 0, yanchor: "bottom", font: { size: 12 } });
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star"];
const finest = (scopes) => Math.max(0, scopes.indexOf("attention"));

PARTS.growth = (part, study) => {
  const scopes = [...new Set(study.growth.map((curve) => curve.scope))];
  let scope = finest(scopes), only = -1;
  const curves = () => study.growth.filter((curve) => curve.scope === scopes[scope]);
  const redraw = () => { growth(); radius(); laws.replaceChildren(lawTable(curves())); };
  const which = choice("map", scopes, (i) => { scope = i; only = -1; refill(); redraw(); });
  const layer = choice("layer", [], (i) => { only = i; redraw(); });
  const refill = () => layer.select.replaceChildren(
    element("option", { value: "-1", textContent: "all" }),
    ...curves().map((curve, i) => element("option", { value: String(i), textContent: curve.layer })));
  which.select.value = String(scope);
  refill();
  const holder = element("div", { className: "charts" }), laws = element("div", { className: "scroll" });
  part.append(element("div", { className: "controls" }, which.label, layer.label), holder, laws);
  const shared = (t, curve) => ({ x: curve.n, name: plain(curve.layer), legendgroup: curve.layer, hoverinfo: "text" });
  const layout = (t, text, lengths) => ({
    height: 430, margin: { l: 64, r: 16, t: 36, b: isNarrow() ? 150 : 110 }, title: { text, font: { size: 14 }, x: 0, xanchor: "left" },
    xaxis: logAxis(t, lengths, { title: { text: "n, tokens" }, ...atLengths(lengths) }),
    legend: below(), hovermode: "closest",
  });
  const growth = chart(holder, "σ against length on log axes, with fitted power laws; the table below gives the exponents.", (t) => {
    const all = curves(), traces = [], lengths = [...new Set(all.flatMap((c) => c.n))].sort((a, b) => a - b);
    all.forEach((curve, i) => {
      if (only >= 0 && only !== i) return;
      const colour = lineColour(i, all.length), law = curve.law, ends = [curve.n[0], curve.n.at(-1)];
      if (only === i && law) traces.push(band(curve, colour));
      if (law) traces.push({ ...shared(t, curve), x: ends, y: ends.map((n) => law[0] * n ** law[1]), mode: "lines", line: { color: colour, width: 2 }, hoverinfo: "skip", showlegend: false });
      traces.push({
        ...shared(t, curve), y: curve.cells.map((c) => c[0]), mode: law ? "markers" : "markers+lines",
        marker: { color: colour, symbol: SYMBOLS[i % SYMBOLS.length], size: 9 }, line: { color: colour, width: 1 },
        error_y: { type: "data", symmetric: false, array: curve.cells.map((c) => c[4] - c[0]), arrayminus: curve.cells.map((c) => c[0] - c[3]), color: colour, thickness: 1, width: 3 },
        hovertext: curve.cells.map((c, k) => [`<b>${plain(curve.layer)}</b>, n = ${curve.n[k]}`, `σ = ${number(c[0])}, known to lie in ${interval(c[1], c[2])}`,
          `over ${c[5]} samples ${interval(c[3], c[4])}`, law ? `law: n^${law[1].toFixed(2)} [${law[2].toFixed(2)}, ${law[3].toFixed(2)}]` : "no law: too few lengths"].join("<br>")),
      });
    });
    traces.push(...guides(all, lengths, t));
    return { traces, layout: { ...layout(t, "σ(n): medians, ranges, fitted laws", lengths), yaxis: logAxis(t, all.flatMap((c) => c.cells.flatMap((x) => [x[3], x[4]])), { title: { text: "σ" } }) } };
  });
  const radius = chart(holder, "R(n), the largest norm of a token at the map's input, against length.", (t) => {
    const all = curves(), lengths = [...new Set(all.flatMap((c) => c.n))].sort((a, b) => a - b);
    const traces = all.map((curve, i) => ({
      ...shared(t, curve), y: curve.R, mode: "lines+markers", visible: only < 0 || only === i, showlegend: false,
      line: { color: lineColour(i, all.length), width: 2 }, marker: { symbol: SYMBOLS[i % SYMBOLS.length], size: 7 },
      hovertext: curve.R.map((r, k) => `<b>${plain(curve.layer)}</b>, n = ${curve.n[k]}<br>R = ${number(r)}`),
    }));
    return { traces, layout: { ...layout(t, "R(n): largest token norm", lengths), yaxis: axis(t, { title: { text: "R" }, rangemode: "tozero" }) } };
  });
  redraw();
};

// The law with its exponent at either end of the interval, pivoting at the middle of the lengths.
function band(curve, colour) {
  const [C, alpha, low, high] = curve.law, first = curve.n[0], last = curve.n.at(-1), middle = Math.sqrt(first * last);
  const through = (n, slope) => C * middle ** alpha * (n / middle) ** slope;
  const x = [first, middle, last];
  const upper = x.map((n) => Math.max(through(n, low), through(n, high))), lower = x.map((n) => Math.min(through(n, low), through(n, high)));
  return { x: [...x, ...x.reverse()], y: [...upper, ...lower.reverse()], fill: "toself", fillcolor: colour.replace("rgb", "rgba").replace(")", ",0.18)"), mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
}

function guides(curves, lengths, t) {
  if (lengths.length < 2) return [];
  const start = Math.min(...curves.flatMap((c) => c.cells.map((x) => x[3])).filter((x) => x > 0)) * 0.8;
  const ends = [lengths[0], lengths.at(-1)];
  return [["n^1/4", 0.25, "dot"], ["n^1/2", 0.5, "dash"]].map(([name, power, dash]) => ({
    x: ends, y: ends.map((n) => start * (n / ends[0]) ** power), mode: "lines+text", text: ["", name], textposition: "top left",
    textfont: { color: t.muted, size: 12 }, line: { color: t.muted, width: 2, dash }, name: `guide ${name}`, hoverinfo: "name",
  }));
}

function lawTable(curves) {
  const head = ["layer", "σ at the largest n", "exponent α", "95 % interval", "rms in log σ", "R, first → last n"];
  const lines = curves.map((c) => [c.layer, number(c.cells.at(-1)[0]), ...(c.law ? [c.law[1].toFixed(2), `[${c.law[2].toFixed(2)}, ${c.law[3].toFixed(2)}]`, c.law[4].toFixed(2)] : ["–", "–", "–"]),
    `${number(c.R[0], 3)} → ${number(c.R.at(-1), 3)}`]);
  return simpleTable(head, lines);
}

function simpleTable(head, lines) {
  const cells = (tag, line) => line.map((text, i) => element(tag, { textContent: text, className: i ? "" : "text" }));
  return element("table", {}, element("thead", {}, element("tr", {}, ...cells("th", head))),
    element("tbody", {}, ...lines.map((line) => element("tr", {}, ...cells("td", line)))));
}

const traceValues = (traces) => traces.flatMap((trace) => trace.x);

PARTS.bounds = (part, study) => {
  if (!study.bounds.length) return;
  const names = [...new Set(study.bounds.flatMap((item) => item.marks.map((mark) => `${mark[0]} (${mark[1]})`)))];
  const where = (item) => plain(`${item.layer}, ${item.scope}`);
  const draw = chart(part, "σ of each map between its bounds, on a log axis.", (t) => {
    const sigma = {
      y: study.bounds.map(where), x: study.bounds.map((item) => item.sigma[0]), mode: "markers", name: "σ, measured", hoverinfo: "text",
      marker: { symbol: "diamond", size: 12, color: t.accent },
      hovertext: study.bounds.map((item) => `<b>${where(item)}</b>, n = ${item.n}<br>σ = ${number(item.sigma[0])} in ${interval(item.sigma[1], item.sigma[2])}`),
    };
    const others = names.map((name, i) => {
      const found = study.bounds.flatMap((item) => item.marks.filter((mark) => `${mark[0]} (${mark[1]})` === name && mark[2] > 0 && Number.isFinite(mark[2])).map((mark) => [item, mark[2]]));
      return {
        y: found.map(([item]) => where(item)), x: found.map(([, value]) => value), mode: "markers", name: plain(name), hoverinfo: "text",
        marker: { symbol: `${SYMBOLS[(i + 1) % SYMBOLS.length]}-open`, size: 11, color: lineColour(i, names.length), line: { width: 2 } },
        hovertext: found.map(([item, value]) => `<b>${plain(name)}</b><br>${where(item)}<br>${number(value)}, ${number(value / item.sigma[0], 3)} × σ`),
      };
    });
    const height = Math.min(1400, 210 + 26 * study.bounds.length);
    return { traces: [sigma, ...others], layout: { height, yaxis: axis(t, { autorange: "reversed", type: "category" }), xaxis: logAxis(t, traceValues([sigma, ...others]), { title: { text: "σ and its bounds" } }), margin: { l: 64, r: 16, t: 16, b: 110 }, legend: below(), hovermode: "closest" } };
  });
  draw();
};
