"use strict";
// Shared by all parts: the data, elements with text content only (never HTML), numbers, the tooltip.

const PARTS = {};

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties || {});
  made.append(...children);
  return made;
}

function choice(label, options, onchange) {
  const select = element("select", { onchange: () => onchange(Number(select.value)) });
  const fill = (texts) => select.replaceChildren(...texts.map((text, i) => element("option", { value: String(i), textContent: text })));
  fill(options);
  return { label: element("label", {}, element("span", { textContent: label }), select), select, fill };
}

const controls = (part, ...labels) => part.prepend(element("div", { className: "controls" }, ...labels));

// Significant digits that stay: 18.0000 beside 18.3012; without them, a whole number.
function number(value, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  return digits && value !== 0 ? value.toPrecision(digits) : String(value);
}

// One tooltip for pointer and keyboard; as a status it is read out when its text changes.
const tip = element("div", { className: "tip", role: "status", hidden: true });
document.body.append(tip);

function showTip(text, box) {
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - width / 2), window.innerWidth - width - 8);
  const above = box.top - height - 10;
  tip.style.left = `${left}px`;
  tip.style.top = `${above >= 8 ? above : box.bottom + 10}px`;
}

// Deflated JSON in base64, a fifth of its plain size.
async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
