"use strict";
// Shared by all parts: the data, elements with text content only (never HTML), colours, numbers.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STUDIES = DATA.studies;
const PARTS = {};
const drawn = [];
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let printing = false;

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties || {});
  made.append(...children);
  return made;
}

function choice(label, options, onchange) {
  const select = element("select", { onchange: () => onchange(Number(select.value)) });
  options.forEach((text, i) => select.append(element("option", { value: String(i), textContent: text })));
  return { label: element("label", {}, element("span", { textContent: label }), select), select };
}

// Plotly interprets some HTML in its texts, so whatever comes from a study is escaped.
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return String(Number(value.toPrecision(digits)));
}

const interval = (low, high) => `[${number(low)}, ${number(high)}]`;
const isDark = () => dark.matches && !printing;
const isNarrow = () => window.innerWidth < 760;

function theme() {
  const style = getComputedStyle(document.documentElement);
  const light = { paper: "#ffffff", ink: "#1b1f24", muted: "#57606a", line: "#d5dae0", accent: "#0b57a4" };
  if (printing) return light;
  return Object.fromEntries(Object.keys(light).map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Palettes of monotone lightness: readable in greyscale and by colour-blind eyes.
const PALETTES = {
  light: [[247, 251, 255], [222, 235, 247], [198, 219, 239], [158, 202, 225], [107, 174, 214], [49, 130, 189], [8, 81, 156], [8, 48, 107]],
  dark: [[29, 34, 40], [36, 54, 90], [72, 80, 108], [110, 110, 114], [148, 141, 118], [190, 174, 107], [228, 206, 88], [255, 234, 70]],
  lines: [[68, 1, 84], [70, 50, 127], [54, 92, 141], [39, 127, 142], [31, 161, 135], [74, 194, 109], [159, 218, 58], [253, 231, 37]],
};

function mix(palette, t) {
  const at = Math.min(Math.max(t, 0), 1) * (palette.length - 1);
  const i = Math.min(Math.floor(at), palette.length - 2);
  return palette[i].map((low, c) => Math.round(low + (at - i) * (palette[i + 1][c] - low)));
}

// Small values are close to the colour of the page, large ones far from it.
const intensity = (t) => mix(isDark() ? PALETTES.dark : PALETTES.light, t);
const css = (rgb) => `rgb(${rgb.join(",")})`;
const textOn = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 130 ? "#000000" : "#ffffff");
const colorscale = () => [0, 1, 2, 3, 4, 5, 6, 7].map((i) => [i / 7, css(intensity(i / 7))]);

// One colour per layer, by depth, distinct from the colour of the page.
function lineColour(i, count) {
  const t = count > 1 ? i / (count - 1) : 0.5;
  return css(mix(PALETTES.lines, isDark() ? 0.35 + 0.65 * t : 0.8 * t));
}

// Paper is narrower than the window that the charts were drawn for.
function printWidth(div) {
  if (!div.parentElement.classList.contains("charts")) return 690;
  return div.previousElementSibling ? 270 : 410;
}

function chart(holder, label, make) {
  const div = element("div", { className: "chart", role: "img" });
  div.setAttribute("aria-label", label);
  holder.append(div);
  const draw = () => {
    const t = theme();
    const { traces, layout } = make(t, div);
    const base = {
      paper_bgcolor: t.paper, plot_bgcolor: t.paper, font: { color: t.ink, size: 13, family: "system-ui, DejaVu Sans, sans-serif" },
      hoverlabel: { bgcolor: t.paper, bordercolor: t.muted, font: { color: t.ink }, align: "left" },
      margin: { l: 64, r: 16, t: 36, b: 52 }, width: printing ? printWidth(div) : div.clientWidth || 600,
    };
    Plotly.react(div, traces, { ...base, ...layout }, { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  };
  drawn.push(draw);
  return draw;
}

const axis = (t, extra) => ({ gridcolor: t.line, zeroline: false, linecolor: t.muted, automargin: true, ...extra });
const logAxis = (t, values, extra) => axis(t, { type: "log", ...decades(values), ...extra });

// Ticks at 1, 2 and 5 times powers of ten, or at powers of ten only if there are many.
function decades(values) {
  const known = values.filter((x) => x > 0 && Number.isFinite(x)).map(Math.log10);
  if (!known.length) return {};
  const low = Math.floor(Math.min(...known)) - 1, high = Math.ceil(Math.max(...known)) + 1;
  const step = Math.ceil((high - low) / 12), marks = high - low > 6 ? [1] : [1, 2, 5];
  const tickvals = [];
  for (let power = low; power <= high; power += step) tickvals.push(...marks.map((mark) => mark * 10 ** power));
  return { tickmode: "array", tickvals, ticktext: tickvals.map((x) => number(x, 1)) };
}

const atLengths = (lengths) => ({ tickmode: "array", tickvals: lengths, ticktext: lengths.map(String) });
