// The tokens of a sample, coloured by their share of the singular vectors; keys move over them.

PARTS.tokens = (part, data) => {
  const { words, strips, first, unit } = data.tokens;
  const sides = [...part.querySelectorAll(".strip")].map((strip) => tokenStrip(strip, unit));
  const layers = [...new Set(strips.map((strip) => strip.layer))];
  let now = strips[first];
  const within = () => strips.filter((strip) => strip.layer === now.layer);
  const layer = choice("layer", layers, (i) => {
    const there = strips.filter((strip) => strip.layer === layers[i]);
    now = there.find((strip) => strip.map === now.map) || there[0];
    show();
  });
  const map = choice("map", [], (i) => { now = within()[i]; show(); });
  const without = element("input", { type: "checkbox", onchange: () => show() });
  controls(part, layer.label, map.label, element("label", {}, without, element("span", { textContent: "without token 0" })));

  function show() {
    map.fill(within().map((strip) => strip.map));
    map.select.value = String(within().indexOf(now));
    layer.select.value = String(layers.indexOf(now.layer));
    part.querySelector(".about").textContent = now.about;
    sides.forEach((side) => side.show(words[now.words], now, without.checked));
  }
  show();
};

function tokenStrip(strip, unit) {
  const side = strip.dataset.side;
  let tokens = [], norms = null, current = -1;

  function point(i) {
    if (tokens[current]) tokens[current].classList.remove("current");
    current = i;
    const token = tokens[i];
    if (!token) return showTip("");
    token.classList.add("current");
    const share = (name) => `${(norms[name][i] / unit).toFixed(3)} (${(100 * (norms[name][i] / unit) ** 2).toFixed(1)} %)`;
    showTip(`Token ${i} “${token.textContent}”\ninput norm ${share("right")}\noutput norm ${share("left")}`, token.getBoundingClientRect());
  }
  const at = (event) => tokens.indexOf(event.target.closest(".token"));
  strip.addEventListener("pointerover", (event) => point(at(event)));
  strip.addEventListener("pointerleave", () => point(-1));
  strip.addEventListener("blur", () => point(-1));
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const goal = event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : step && Math.max(0, current + step);
    if (goal === undefined || !tokens[goal]) return;
    event.preventDefault();
    tokens[goal].scrollIntoView({ block: "nearest" });
    point(goal);
  });

  function show(texts, from, leaveOut) {
    norms = from;
    current = -1;
    const counted = from[side].map((norm, i) => (leaveOut && i === 0 ? 0 : norm));
    const most = Math.max(...counted) || 1;
    tokens = texts.map((text, i) => {
      // The square root, as in the page without a script: small shares stay visible.
      const level = Math.round(31 * Math.sqrt(counted[i] / most));
      const token = element("span", { className: `token c${level}`, textContent: text });
      token.classList.toggle("left-out", leaveOut && i === 0);
      return token;
    });
    strip.replaceChildren(...tokens);
  }
  return { show };
}
