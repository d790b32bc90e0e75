// The marks of charts answer pointer and arrow keys; controls choose a length, a map, a layer.

const REACH = 16; // pixels between the pointer and a mark

function awaken(canvas) {
  // Titles serve readers without a script; here the page's own tooltip takes their place.
  for (const title of canvas.querySelectorAll("title")) {
    title.parentElement.dataset.tip = title.textContent;
    title.remove();
  }
  const twins = canvas.querySelectorAll(".narrow .mark");
  canvas.querySelectorAll(".wide .mark").forEach((mark, i) => { twins[i].dataset.tip = mark.dataset.tip; });
  let current = null;
  const visible = () => [...canvas.querySelectorAll(".mark")].filter((mark) => mark.getClientRects().length && !mark.closest(".off"));

  function point(mark) {
    if (current) current.classList.remove("current");
    current = mark;
    if (!mark) return showTip("");
    mark.classList.add("current");
    showTip(mark.dataset.tip, mark.getBoundingClientRect());
  }

  canvas.addEventListener("pointermove", (event) => {
    let best = null, least = REACH;
    for (const mark of visible()) {
      const box = mark.getBoundingClientRect();
      const across = Math.max(box.left - event.clientX, 0, event.clientX - box.right);
      const along = Math.max(box.top - event.clientY, 0, event.clientY - box.bottom);
      const distance = Math.hypot(across, along);
      if (distance < least) [best, least] = [mark, distance];
    }
    if (best !== current) point(best);
  });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Escape") return point(null);
    if (!step && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const marks = visible();
    if (!current || !step) return point(event.key === "End" ? marks.at(-1) : marks[0]);
    point(next(current, marks, step) || current);
  });
}

// The nearest mark in a direction; what lies beside the way counts three times.
function next(from, marks, [right, down]) {
  const centre = (mark) => { const box = mark.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; };
  const [x, y] = centre(from);
  let best = null, least = Infinity;
  for (const mark of marks) {
    const [u, v] = centre(mark), along = (u - x) * right + (v - y) * down, beside = Math.abs((u - x) * down) + Math.abs((v - y) * right);
    if (along > 1 && along + 3 * beside < least) [best, least] = [mark, along + 3 * beside];
  }
  return best;
}

// A heat map with several frames: the script changes text, colour class and tooltip of each cell.
PARTS.frames = (part, data) => {
  const { label, names, frames, chosen } = data[part.dataset.frames];
  const show = (i) => {
    const cells = frames[i].flat().filter(Boolean);
    for (const svg of part.querySelectorAll("svg")) {
      const texts = svg.querySelectorAll(".on");
      svg.querySelectorAll(".cell").forEach((cell, k) => {
        const [text, colour, title] = cells[k];
        cell.setAttribute("class", `cell ${colour}`);
        cell.querySelector(".mark").dataset.tip = title;
        if (!texts[k]) return;
        texts[k].setAttribute("class", `on ${colour}`);
        texts[k].querySelector("text").textContent = text;
      });
    }
  };
  if (names.length < 2) return;
  const picked = choice(label, names, show);
  picked.select.value = String(chosen === undefined ? names.length - 1 : chosen);
  controls(part, picked.label);
};

// Charts drawn for several maps, of which one is shown; a curve can be singled out.
PARTS.views = (part) => {
  const views = [...part.querySelectorAll(".view")];
  const curves = (view) => [...view.querySelectorAll("tbody th")].map((cell) => cell.textContent.trim());
  const single = choice(part.dataset.series || "layer", [], (only) => {
    for (const shape of part.querySelectorAll("[data-series]")) shape.classList.toggle("off", only > 0 && Number(shape.dataset.series) !== only - 1);
  });
  const refill = (view) => { single.fill(["all", ...curves(view)]); single.select.onchange(); };
  const which = choice(part.dataset.label, views.map((view) => view.dataset.view), (i) => {
    views.forEach((view, k) => { view.hidden = k !== i; });
    refill(views[i]);
  });
  const at = Math.max(0, views.findIndex((view) => !view.hidden));
  which.select.value = String(at);
  refill(views[at]);
  controls(part, ...(views.length > 1 ? [which.label] : []), ...(curves(views[at]).length > 1 ? [single.label] : []));
};
