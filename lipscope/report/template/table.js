// All rows, page by page: click a column to sort, type words or conditions to filter, save as CSV.

const PAGE = 50;
const HELP = "layer=3 n>=64 σ>10";
const DIGITS = { value: 6, lower: 6, upper: 6, radius: 4, residual: 2, seconds: 2 };
const FIRST = ["scope", "layer", "head", "n", "sample", "value", "lower", "upper", "status", "reason", "probe"];

PARTS.table = (part, data) => {
  const { count, columns } = data.table;
  if (!count) return part.append(element("p", { className: "note", textContent: "There are no rows." }));
  const all = [...FIRST, ...Object.keys(columns).filter((name) => !FIRST.includes(name))];
  const isText = (name) => !Array.isArray(columns[name]);
  const read = (name, i) => (isText(name) ? columns[name].texts[columns[name].at[i]] : columns[name][i]);
  const show = (name, i) => (isText(name) ? read(name, i) : number(read(name, i), DIGITS[name]));
  // A column with one value is a sentence.
  const constant = (name) => (isText(name) ? columns[name].texts.length === 1 : columns[name].every((x) => x === columns[name][0]));
  const fixed = all.filter((name) => constant(name) && count > 1 && name !== "value"), names = all.filter((name) => !fixed.includes(name));
  let order = Array.from({ length: count }, (_, i) => i), kept = order, page = 0, sorted = null, down = false;

  const filter = element("input", { type: "search", placeholder: HELP, oninput: () => later(refilter) });
  const status = element("span", { className: "note", role: "status" });
  const back = element("button", { type: "button", textContent: "‹ back", onclick: () => turn(-1) });
  const next = element("button", { type: "button", textContent: "next ›", onclick: () => turn(1) });
  const save = element("button", { type: "button", textContent: "Save as CSV", onclick: download });
  const heads = names.map((name) => {
    const button = element("button", { type: "button", textContent: name, onclick: () => sort(name) });
    return element("th", { scope: "col", className: isText(name) ? "text" : "" }, button);
  });
  const body = element("tbody");
  const scroll = element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "All rows" },
    element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
  const hint = element("p", { className: "note", textContent: "More columns to the right: scroll sideways." });
  const same = fixed.map((name) => `${name} ${show(name, 0)}`).join(", ");
  part.append(element("div", { className: "controls" }, element("label", {}, element("span", { textContent: "filter" }), filter), back, next, save, status),
    element("p", { className: "note", textContent: `Filter by words, or by conditions such as ${HELP}.${same ? ` In every row: ${same}.` : ""}` }), hint, scroll);

  let waiting = 0;
  function later(work) { clearTimeout(waiting); waiting = setTimeout(work, 120); }

  function turn(by) { page += by; fill(); }

  function fill() {
    const pages = Math.max(1, Math.ceil(kept.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const rows = kept.slice(page * PAGE, (page + 1) * PAGE);
    body.replaceChildren(...rows.map((i) => element("tr", {}, ...names.map((name) => {
      const text = show(name, i);
      return element("td", { textContent: text, className: isText(name) ? "text" : "", title: text.length > 24 ? text : "" });
    }))));
    status.textContent = kept.length ? `${page * PAGE + 1} to ${page * PAGE + rows.length} of ${kept.length.toLocaleString("en")} rows` : "no row matches";
    back.disabled = page === 0;
    next.disabled = page === pages - 1;
    hint.hidden = scroll.scrollWidth <= scroll.clientWidth;
  }

  function sort(name) {
    down = sorted === name && !down;
    sorted = name;
    const sign = down ? -1 : 1, key = isText(name) ? ranks(columns[name]) : columns[name];
    order.sort((a, b) => {
      const x = key[a], y = key[b];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return x < y ? -sign : x > y ? sign : a - b;
    });
    names.forEach((other, i) => {
      heads[i].firstChild.textContent = other + (other === name ? (down ? " ▼" : " ▲") : "");
      heads[i].setAttribute("aria-sort", other === name ? (down ? "descending" : "ascending") : "none");
    });
    refilter();
  }

  function ranks({ texts, at }) {
    const rank = new Map([...texts.keys()].sort((a, b) => (texts[a] < texts[b] ? -1 : 1)).map((t, i) => [t, i]));
    return at.map((t) => rank.get(t));
  }

  function refilter() {
    const tests = filter.value.toLowerCase().replace(/\s*(<=|>=|[=<>≤≥])\s*/g, "$1").split(/\s+/).filter(Boolean).map(condition);
    kept = tests.length ? order.filter((i) => tests.every((test) => test(i))) : order;
    page = 0;
    fill();
  }

  function condition(word) {
    const parts = /^([\wσ]+)(<=|>=|[=<>≤≥])(.+)$/.exec(word);
    const given = parts && parts[1], sigma = given === "sigma" || given === "σ", name = sigma ? "value" : given;
    if (!parts || !all.includes(name)) return (i) => all.some((column) => show(column, i).toLowerCase().includes(word));
    const sign = { "≤": "<=", "≥": ">=" }[parts[2]] || parts[2], limit = Number(parts[3]);
    if (isText(name)) return (i) => read(name, i).toLowerCase() === parts[3];
    const compare = { "=": (x) => x === limit, "<": (x) => x < limit, ">": (x) => x > limit, "<=": (x) => x <= limit, ">=": (x) => x >= limit }[sign];
    // σ is the value of a row that measures σ, not that of a bound.
    return (i) => (!sigma || read("probe", i) === "sigma") && read(name, i) !== null && compare(read(name, i));
  }

  function download() {
    // Texts that a spreadsheet would run as a formula get an apostrophe in front.
    const quote = (text) => `"${(/^\s*[=+\-@]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
    const value = (name, i) => (isText(name) ? quote(read(name, i)) : read(name, i) === null ? "" : String(read(name, i)).replace("Infinity", "inf"));
    const lines = [all.join(","), ...kept.map((i) => all.map((name) => value(name, i)).join(","))];
    const address = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
    element("a", { href: address, download: "lipscope.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  fill();
  window.addEventListener("resize", () => { hint.hidden = scroll.scrollWidth <= scroll.clientWidth; });
};
