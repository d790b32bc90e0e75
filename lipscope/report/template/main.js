// Draws every part, and redraws when the colour scheme, the width or the medium changes.

const redrawAll = () => drawn.forEach((draw) => draw());

for (const part of document.querySelectorAll("[data-part]")) PARTS[part.dataset.part](part, STUDIES[Number(part.dataset.study)]);

let width = window.innerWidth, resizing = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  clearTimeout(resizing);
  resizing = setTimeout(redrawAll, 150);
});
dark.addEventListener("change", redrawAll);
window.addEventListener("beforeprint", () => { printing = true; redrawAll(); });
window.addEventListener("afterprint", () => { printing = false; redrawAll(); });
document.documentElement.dataset.ready = "yes";
