"""The pages in a real browser, offline: they draw, react to pointer and keys, and escape words."""

import csv
import io
import shutil
from pathlib import Path

import pytest

from lipscope.report.page import write_report
from tests.report.made import HARMLESS, HOSTILE, bounded, failed, grid, study, worst_found

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000  # milliseconds: a loaded machine is slow, not wrong

LINK = "bound: <a href='https://example.org'>x</a>"
SKELETON = """() => [...document.querySelectorAll("body *")].map(
    (e) => e.tagName + ":" + e.getAttributeNames().join())"""


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium
        running = chromium.launch(executable_path=program, args=FLAGS.split(), timeout=PATIENCE)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Opens pages offline; any error, or request to the network, fails at the end."""
    contexts, complaints = [], []

    def opened(path, width=1400, scheme="light", script=True):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            offline=True,
            reduced_motion="reduce",
            java_script_enabled=script,
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "blob:")) or complaints.append(request.url)
            ),
        )
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.as_uri())
        if script:
            page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    place = tmp_path_factory.mktemp("plain")
    rows = grid()
    around = {"bound: Castin et al., ball": 80.0}
    return write_report(study(place / "s", rows + bounded(rows, around)), place / "r.html")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    place = tmp_path_factory.mktemp("several")
    made = [
        study(place / f"s{i}", [r._replace(value=r.value * 2**i, upper=1e9) for r in grid()])
        for i in range(3)
    ]
    return write_report(made, place / "c.html")


def test_marks_answer_the_pointer(visit, plain):
    page = visit(plain)
    cell = page.locator("#rough .wide .cell").last.locator(".mark")
    cell.scroll_into_view_if_needed()
    cell.hover()
    said = page.locator(".tip").text_content()
    # Layer 1, attention, n = 32: the median of 2 sqrt(32) and 1.1 times that.
    assert said.startswith("layer 1, attention, n = 32")
    assert "σ = 11.88, median of 2 samples" in said
    page.mouse.move(5, 5)
    assert page.locator(".tip").is_hidden()


def test_marks_answer_on_a_telephone(visit, plain):
    page = visit(plain, width=390)
    for spot, start in (("#rough .cell", "layer 1, attention"), ("#worst", "layer 1, attention")):
        mark = page.locator(f"{spot} .mark >> visible=true").last
        mark.scroll_into_view_if_needed()
        mark.hover()
        assert page.locator(".tip").text_content().startswith(start)
        box = page.locator(".tip").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_the_length_of_the_heat_map_is_chosen(visit, plain):
    page = visit(plain)
    svg = page.locator("#rough .wide svg")
    before = svg.evaluate("e => e.outerHTML")
    page.locator("#rough select").select_option(label="8")
    assert svg.evaluate("e => e.outerHTML") != before
    # Layer 1, attention, n = 8: 2 sqrt(8) 1.05.
    assert page.locator("#rough .wide .on text").last.text_content() == "5.94"
    page.locator("#rough select").select_option(label="32")
    assert svg.evaluate("e => e.outerHTML") == before, "the script draws what Python drew"


def test_arrow_keys_walk_over_a_heat_map(visit, plain):
    page = visit(plain)
    page.locator("#rough .canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".tip").text_content().startswith("layer 0, head 0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator(".tip").text_content().startswith("layer 1, head 1")
    page.keyboard.press("End")
    assert page.locator(".tip").text_content().startswith("layer 1, attention")
    page.keyboard.press("Escape")
    assert page.locator(".tip").is_hidden()


def test_a_map_and_a_layer_of_the_growth_are_chosen(visit, plain):
    page = visit(plain)
    growth = page.locator("#growth")
    assert growth.locator(".view:visible").get_attribute("data-view") == "attention"
    growth.locator("select").nth(0).select_option(label="heads")
    assert growth.locator(".view:visible").get_attribute("data-view") == "heads"
    growth.locator("select").nth(1).select_option(label="● layer 0")
    shapes = growth.locator(".view:visible .wide [data-series]")
    faded = {
        (shape.get_attribute("data-series"), "off" in shape.get_attribute("class"))
        for shape in shapes.all()
    }
    assert faded == {("0", False), ("1", True)}
    point = growth.locator(".view:visible .wide [data-series='0'] .mark").first
    point.hover()
    assert page.locator(".tip").text_content().startswith("layer 0, n = 8")
    assert "law: n⁰·⁵⁰" in page.locator(".tip").text_content()


def test_the_tokens_of_a_head_and_without_the_first(visit, plain):
    page = visit(plain)
    tokens = page.locator("#tokens")
    strip = tokens.locator(".strip").first
    assert tokens.locator(".about").text_content().startswith("layer 1, attention: σ = 12.45")
    tokens.locator("select").nth(0).select_option(label="layer 0")
    tokens.locator("select").nth(1).select_option(label="heads, head 1")
    assert tokens.locator(".about").text_content().startswith("layer 0, heads, head 1: σ = 3.111")
    assert strip.locator(".token").all_text_contents()[:8] == list(HARMLESS)
    tokens.locator("input").check()
    assert "left-out" in strip.locator(".token").first.get_attribute("class")
    # The fake norms are 1 to 32 on the input side: the last one is the darkest.
    assert "c31" in strip.locator(".token").last.get_attribute("class")


def test_the_script_colours_tokens_as_the_page_without_it(visit, plain):
    classes = "els => els.map((e) => e.className)"
    without = visit(plain, script=False).locator("#tokens .token")
    assert visit(plain).locator("#tokens .token").evaluate_all(classes) == without.evaluate_all(
        classes
    )


def test_keys_reach_the_tokens(visit, plain):
    page = visit(plain)
    page.locator("#tokens .strip").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".tip").text_content().startswith("Token 2 “three”\ninput norm ")
    page.keyboard.press("End")
    assert page.locator(".tip").text_content().startswith("Token 31 “eight”")


def count(page, text):
    page.locator("#table input").fill(text)
    page.wait_for_timeout(200)
    found = page.locator("#table [role=status]").text_content()
    return 0 if found == "no row matches" else int(found.split(" of ")[1].split()[0])


def test_the_table_sorts_and_filters(visit, plain):
    page = visit(plain)
    table = page.locator("#table")
    value = table.locator("thead th").all_text_contents().index("value")
    table.locator("thead button").nth(value).click()
    table.locator("thead button").nth(value).click()
    column = f"tbody tr td:nth-child({value + 1})"
    shown = [float(text) for text in table.locator(column).all_text_contents()]
    assert shown == sorted(shown, reverse=True)
    assert shown[0] == pytest.approx(80 * 12.4451, rel=1e-5)
    assert count(page, "probe=sigma scope=heads layer=1 n>=32 value<8") == 2
    assert count(page, "σ>10") == count(page, "sigma > 10") == count(page, "σ≥10") == 4
    assert count(page, "value>10") == 16, "bounds have values too"
    assert count(page, "nonsense") == 0


def test_rows_are_saved_as_csv(visit, plain):
    page = visit(plain)
    assert count(page, "probe=sigma n=8 layer=0") == 6
    with page.expect_download() as download:
        page.get_by_text("Save as CSV").click()
    rows = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    assert len(rows) == 6 and {row["layer"] for row in rows} == {"0"}
    assert max(float(row["value"]) for row in rows) == pytest.approx(8**0.5 * 1.1, rel=1e-5)


def test_hostile_words_are_words(visit, tmp_path):
    rows = grid()
    evil = dict(
        zip(("model", "text", "architecture", "command"), (*HOSTILE[:3], HOSTILE[4]), strict=True)
    )
    hostile = study(tmp_path / "s", rows + bounded(rows, {LINK: 80.0}), HOSTILE, **evil)
    calm = study(
        tmp_path / "t", rows + bounded(rows, {"bound: x": 80.0}), **dict.fromkeys(evil, "words")
    )
    pages = [
        visit(write_report(one, tmp_path / f"{i}.html")) for i, one in enumerate((hostile, calm))
    ]
    for page in pages:
        page.locator("#tokens select").first.select_option(label="layer 0")
    assert pages[0].evaluate(SKELETON) == pages[1].evaluate(SKELETON)
    assert pages[0].evaluate("window.broken") is None
    assert pages[0].locator("a:not(.skip), img, iframe, object, form, [type=file]").count() == 0


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window(visit, plain, several, width, scheme):
    for path in (plain, several):
        page = visit(path, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
        sizes = page.evaluate(
            "[...document.querySelectorAll('.canvas text')]"
            ".filter((t) => t.getClientRects().length)"
            ".map((t) => { const m = t.getScreenCTM();"
            " return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b); })"
        )
        assert min(sizes) > 10, "texts of charts are readable"


@pytest.mark.parametrize(
    "rows", [[], [failed()], grid(lengths=(8,)), grid(layers=1, heads=0)], ids=len
)
def test_odd_studies_open(visit, rows, tmp_path):
    page = visit(write_report(study(tmp_path / "s", rows), tmp_path / "r.html"))
    assert page.locator("h2").count() >= 3


def test_without_a_script_the_charts_stand(visit, plain):
    page = visit(plain, script=False)
    for part in ("#rough", "#growth", "#worst"):
        chart = page.locator(f"{part} .canvas .wide").locator("visible=true").first
        assert chart.bounding_box()["height"] > 50
    assert page.locator("#rough .wide .cell title").last.text_content().startswith("layer 1, att")
    assert page.locator("#tokens .token").count() == 2 * 32
    assert page.locator("select, button").count() == 0, "no control that does nothing"


def test_several_studies_share_a_chart(visit, several):
    page = visit(several)
    series = page.locator("#growth .view:visible .wide [data-series]")
    assert {shape.get_attribute("data-series") for shape in series.all()} == {"0", "1", "2"}
    page.locator("#heads select").select_option(label="fake/model, s2")
    assert page.locator("#heads .wide .on text").first.text_content() == "4.0"
    page.locator("#growth select").nth(0).select_option(label="layer 0, attention")
    assert page.locator("#growth .view:visible").get_attribute("data-view") == "layer 0, attention"


def test_it_prints_without_the_table(visit, plain):
    page = visit(plain, scheme="dark")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.locator("#table").is_hidden() and page.locator("#rough select").is_hidden()
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)", "paper is white"


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_soon_interactive(visit, tmp_path):
    rows = grid(lengths=(8, 16, 32, 64, 128), layers=25, heads=19, samples=40)
    page = visit(write_report(study(tmp_path / "s", rows), tmp_path / "r.html"))
    assert page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 3000
    assert count(page, "layer=24 n=128 sample=39") == 20


@pytest.mark.parametrize("name", ["study", "bare", "comparison"])
def test_no_rule_of_accessibility_is_violated(visit, tmp_path, name):
    axe = pytest.importorskip(
        "axe_playwright_python", reason="needs axe-core: pip install axe-playwright-python"
    )
    rows = grid(layers=3)
    around = {"bound: Castin et al., ball": 80.0, "bound: input-dependent": 2.0}
    full = study(tmp_path / "full", rows + bounded(rows, around) + worst_found(rows, 3.0))
    bare = study(tmp_path / "bare", [r._replace(value=r.value / 3, lower=0.0) for r in rows])
    shown = {"study": (full, bare), "bare": (bare, None), "comparison": ([full, bare, full], None)}
    page_of, against = shown[name]
    path = write_report(page_of, tmp_path / "page.html", against=against)
    script = (Path(axe.__file__).parent / "axe.min.js").read_text()
    for width in (1400, 390):
        for scheme in ("light", "dark"):
            page = visit(path, width, scheme)
            # Through the debugger, not the page: its policy forbids scripts of others.
            page.evaluate(script)
            found = page.evaluate("axe.run()")["violations"]
            assert [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found] == []
