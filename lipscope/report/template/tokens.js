// The tokens of a sample, coloured by their share of the singular vectors; pointer and arrow keys select one.

PARTS.tokens = (part, study) => {
  const { words, strips } = study.tokens;
  if (!strips.length) return part.append(element("p", { className: "note", textContent: "The study has no token norms." }));
  const layers = [...new Set(strips.map((strip) => strip.layer))];
  const peak = strips.filter((s) => s.scope === "attention").concat(strips).reduce((best, s) => (best && (best.scope !== s.scope || best.value >= s.value) ? best : s), null);
  let now = peak;
  const layer = choice("layer", layers, (i) => { now = strips.find((s) => s.layer === layers[i] && s.scope === now.scope) || strips.find((s) => s.layer === layers[i]); show(); });
  const scope = choice("map", [], (i) => { now = strips.filter((s) => s.layer === now.layer)[i]; show(); });
  const about = element("p", { className: "note" });
  const detail = element("p", { className: "detail" });
  detail.setAttribute("aria-live", "polite");
  const sides = [["right", "Input: tokens whose change matters most"], ["left", "Output: tokens that change most"]].map(([side, title]) => tokenStrip(side, title, detail));
  part.append(element("div", { className: "controls" }, layer.label, scope.label), about, ...sides.flatMap((s) => s.parts), detail);

  function show() {
    const here = strips.filter((s) => s.layer === now.layer);
    scope.select.replaceChildren(...here.map((s, i) => element("option", { value: String(i), textContent: s.scope })));
    scope.select.value = String(here.indexOf(now));
    layer.select.value = String(layers.indexOf(now.layer));
    const head = now.head === null ? "" : `, head ${now.head} (the largest)`;
    const count = words[now.words].length, cut = count < now.n ? `, its first ${count} tokens` : "";
    about.textContent = `${now.layer}, ${now.scope}${head}: σ = ${number(now.value)} at n = ${now.n}, sample ${now.sample}${cut}.`;
    sides.forEach((s) => s.show(words[now.words], now));
    detail.textContent = "Point at a token, or move with the arrow keys, to read its norms.";
  }
  drawn.push(show);
  show();
};

function tokenStrip(side, title, detail) {
  const strip = element("div", { className: "strip", tabIndex: 0, role: "group" });
  strip.setAttribute("aria-label", `${title}; move with the arrow keys`);
  const canvas = element("canvas", { width: 100, height: 1 });
  const top = element("span");
  const scale = element("div", { className: "scale" }, element("span", { textContent: "0" }), canvas, top);
  let tokens = [], norms = null, texts = [], current = -1;

  function point(i) {
    if (i < 0 || i >= tokens.length) return;
    if (tokens[current]) tokens[current].classList.remove("current");
    current = i;
    tokens[i].classList.add("current");
    const share = (name) => `${number(norms[name][i], 3)} (${(100 * norms[name][i] ** 2).toFixed(1)} %)`;
    detail.textContent = `Token ${i} “${texts[i]}”: input norm ${share("right")}, output norm ${share("left")}`;
  }
  const at = (event) => tokens.indexOf(event.target.closest(".token"));
  strip.addEventListener("pointerover", (event) => point(at(event)));
  strip.addEventListener("click", (event) => point(at(event)));
  strip.addEventListener("focus", () => point(Math.max(current, 0)));
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const goal = event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : step && current + step;
    if (goal === undefined) return;
    event.preventDefault();
    point(goal);
    tokens[current].scrollIntoView({ block: "nearest" });
  });

  function show(words, from) {
    const largest = Math.max(...from[side]) || 1;
    norms = from; texts = words; current = -1;
    tokens = words.map((word, i) => {
      const rgb = intensity(from[side][i] / largest);
      const token = element("span", { className: "token", textContent: word });
      token.style.background = css(rgb);
      token.style.color = textOn(rgb);
      return token;
    });
    strip.replaceChildren(...tokens);
    top.textContent = `${number(largest, 3)}, norm of the ${side} singular vector at the token`;
    const brush = canvas.getContext("2d");
    for (let x = 0; x < 100; x++) { brush.fillStyle = css(intensity(x / 99)); brush.fillRect(x, 0, 1, 1); }
  }
  return { parts: [element("h3", { textContent: title }), strip, scale], show };
}
