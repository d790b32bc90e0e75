// All rows, page by page: click a column to sort, type words to filter.

const PAGE = 50;
const HELP = "words, or conditions such as layer=3 n>=64 value>10";

PARTS.table = (part, study) => {
  const { columns, count, values } = study.table;
  if (!count) return part.append(element("p", { className: "note", textContent: "There are no rows." }));
  const isText = (name) => !Array.isArray(values[name]);
  const read = (name, i) => (isText(name) ? values[name].texts[values[name].at[i]] : values[name][i]);
  const show = (name, i) => (isText(name) ? read(name, i) : number(read(name, i), 6));
  let order = Array.from({ length: count }, (_, i) => i), kept = order, page = 0, sorted = null, down = false;

  const filter = element("input", { type: "search", placeholder: HELP, oninput: () => later(refilter) });
  const status = element("span", { className: "note" });
  status.setAttribute("aria-live", "polite");
  const back = element("button", { type: "button", textContent: "‹ back", onclick: () => turn(-1) });
  const next = element("button", { type: "button", textContent: "next ›", onclick: () => turn(1) });
  const heads = columns.map((name) => {
    const button = element("button", { type: "button", textContent: name, onclick: () => sort(name) });
    return element("th", { className: isText(name) ? "text" : "" }, button);
  });
  const body = element("tbody");
  const label = element("label", {}, element("span", { textContent: "filter" }), filter);
  part.append(element("div", { className: "controls" }, label, back, next, status),
    element("div", { className: "scroll", tabIndex: 0 }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body)));

  let waiting = 0;
  function later(work) { clearTimeout(waiting); waiting = setTimeout(work, 120); }

  function turn(by) { page += by; fill(); }

  function fill() {
    const pages = Math.max(1, Math.ceil(kept.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const rows = kept.slice(page * PAGE, (page + 1) * PAGE);
    body.replaceChildren(...rows.map((i) => element("tr", {}, ...columns.map((name) => {
      const text = show(name, i);
      return element("td", { textContent: text, className: isText(name) ? "text" : "", title: text.length > 30 ? text : "" });
    }))));
    status.textContent = kept.length ? `${page * PAGE + 1} to ${page * PAGE + rows.length} of ${kept.length} rows` : "no row matches";
    back.disabled = page === 0;
    next.disabled = page === pages - 1;
  }

  function sort(name) {
    down = sorted === name && !down;
    sorted = name;
    const sign = down ? -1 : 1, key = isText(name) ? ranks(values[name]) : values[name];
    order.sort((a, b) => {
      const x = key[a], y = key[b];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return x < y ? -sign : x > y ? sign : a - b;
    });
    columns.forEach((other, i) => {
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
    const tests = filter.value.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
    kept = tests.length ? order.filter((i) => tests.every((test) => test(i))) : order;
    page = 0;
    fill();
  }

  function condition(word) {
    const parts = /^(\w+)(<=|>=|=|<|>)(.+)$/.exec(word);
    if (!parts || !columns.includes(parts[1])) return (i) => columns.some((name) => show(name, i).toLowerCase().includes(word));
    const [, name, sign, given] = parts, limit = Number(given);
    if (isText(name)) return (i) => read(name, i).toLowerCase() === given;
    const compare = { "=": (x) => x === limit, "<": (x) => x < limit, ">": (x) => x > limit, "<=": (x) => x <= limit, ">=": (x) => x >= limit }[sign];
    return (i) => read(name, i) !== null && compare(read(name, i));
  }

  fill();
};
