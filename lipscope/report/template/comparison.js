// Two studies: the ratio of their sigmas, cell by cell and map by map.

PARTS.comparison = (part) => {
  const { n, layers, columns, ratios, lines } = DATA.comparison;
  if (n === null || !lines.length) return;
  const logs = ratios.map((line) => line.map((ratio) => (ratio === null ? null : Math.log2(ratio))));
  const limit = Math.max(0.1, ...logs.flat().filter((x) => x !== null).map(Math.abs));
  const draw = chart(part, "Ratio of σ, second study to first, over layers and heads; the table below lists the maps.", (t) => {
    const few = columns.length <= (isNarrow() ? 8 : 24) && layers.length <= 40;
    const trace = {
      type: "heatmap", x: columns.map(plain), y: layers.map(plain), z: logs, zmin: -limit, zmax: limit, xgap: 1, ygap: 1, hoverinfo: "text", hoverongaps: false,
      colorscale: [[0, "#2d6fb3"], [0.5, isDark() ? "#2b3037" : "#f4f4f4"], [1, "#c8591a"]],
      hovertext: ratios.map((line, i) => line.map((ratio, j) => (ratio === null ? "" : `<b>${plain(layers[i])}, ${plain(columns[j])}</b><br>σ second / σ first = ${number(ratio)}<br>n = ${n}`))),
      text: few ? ratios.map((line) => line.map((ratio) => (ratio === null ? "" : number(ratio, 3)))) : undefined, texttemplate: few ? "%{text}" : undefined,
      colorbar: { title: { text: "log₂ of the ratio", side: "right" }, thickness: 14, outlinewidth: 0, len: 1 },
    };
    const title = { text: `σ of the second study / σ of the first, n = ${n}`, font: { size: 14 }, x: 0, xanchor: "left" };
    return { traces: [trace], layout: { height: Math.min(900, Math.max(220, 30 * layers.length + 130)), title, yaxis: axis(t, { autorange: "reversed", showgrid: false }), xaxis: headAxis(t, columns) } };
  });
  draw();
  const alpha = (found) => (found ? `${found[0].toFixed(2)} [${found[1].toFixed(2)}, ${found[2].toFixed(2)}]` : "–");
  const head = ["map", "σ, first", "σ, second", "second / first", "difference", "α, first", "α, second"];
  const body = lines.map((line) => [`${line.layer}, ${line.scope}`, number(line.sigma[0]), number(line.sigma[1]), number(line.ratio, 3), number(line.sigma[1] - line.sigma[0], 3), alpha(line.alpha[0]), alpha(line.alpha[1])]);
  part.append(element("div", { className: "scroll" }, simpleTable(head, body)));
};
