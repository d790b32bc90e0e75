"""The page in a real browser, offline: it draws, reacts to pointer and keys, and escapes words."""

import shutil

import pytest

from lipscope.report.page import render
from tests.report.made import HARMLESS, HOSTILE, bounded, failed, grid, study

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000  # milliseconds: a loaded machine is slow, not wrong

LINK = "<a href='https://example.org'>x</a>"  # plotly would make a link of it
SKELETON = """() => [...document.querySelectorAll("body *")].map(
    (e) => e.tagName + ":" + e.getAttributeNames().join())"""


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=FLAGS, timeout=PATIENCE)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Opens a page offline; any error, or request to the network, fails the test at its end."""
    contexts, complaints = [], []

    def opened(path, width=1400, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            offline=True,
            reduced_motion="reduce",
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: request.url.startswith("file:") or complaints.append(request.url),
        )
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.as_uri())
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
    return render(study(place / "s", rows + bounded(rows, {"kim2021": 80.0})), place / "r.html")


def test_charts_answer_the_pointer(visit, plain):
    page = visit(plain)
    assert page.locator(".js-plotly-plot").count() == 4
    area = page.locator("#rough .nsewdrag")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.75 * box["height"])
    page.wait_for_selector("#rough .hoverlayer .hovertext")
    said = page.locator("#rough .hoverlayer").text_content()
    # Layer 1, attention, n = 32: the median of 2 sqrt(32) and 1.1 times that.
    assert (
        "layer 1, attention" in said
        and "σ = 11.88" in said
        and "n = 32" in said
        and "2 samples" in said
    )
    page.locator("#rough select").select_option(label="8")
    assert "n = 8" in page.locator("#rough .gtitle").text_content()


def test_the_layer_of_the_tokens_is_chosen_by_a_control(visit, plain):
    page = visit(plain)
    tokens = page.locator("#tokens")
    assert tokens.locator(".note").first.text_content().startswith("layer 1, attention: σ = 12.45")
    tokens.locator("select").first.select_option(label="layer 0")
    assert tokens.locator(".note").first.text_content().startswith("layer 0, attention: σ = 6.223")
    assert tokens.locator(".strip").first.locator(".token").all_text_contents()[:8] == list(
        HARMLESS
    )


def test_keys_reach_the_tokens(visit, plain):
    page = visit(plain)
    page.locator("#tokens .strip").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tokens .detail").text_content().startswith("Token 2 “three”: input norm ")
    page.keyboard.press("End")
    assert page.locator("#tokens .detail").text_content().startswith("Token 31 “eight”")


def test_the_table_sorts_and_filters(visit, plain):
    page = visit(plain)
    table = page.locator("#table")
    value = table.locator("thead th").all_text_contents().index("value")
    table.locator("thead button").nth(value).click()
    table.locator("thead button").nth(value).click()
    column = f"tbody tr td:nth-child({value + 1})"
    shown = [float(text) for text in table.locator(column).all_text_contents()]
    assert shown == sorted(shown, reverse=True) and shown[0] == pytest.approx(
        80 * 12.4451, rel=1e-5
    )
    table.locator("input").fill("probe=sigma scope=heads layer=1 n>=32 value<8")
    table.locator(".controls .note", has_text="of 2 rows").wait_for()
    assert table.locator("tbody tr").count() == 2


def test_hostile_words_are_words(visit, plain, tmp_path):
    rows = grid()
    evil = {
        "model": HOSTILE[0],
        "text": HOSTILE[1],
        "architecture": HOSTILE[2],
        "command": HOSTILE[4],
    }
    hostile = study(tmp_path / "s", rows + bounded(rows, {LINK: 80.0}), HOSTILE, **evil)
    page, calm = visit(render(hostile, tmp_path / "r.html")), visit(plain)
    for where in (page, calm):
        where.locator("#tokens select").first.select_option(label="layer 0")
    parts = "#smooth, #rough, #tokens, #sure, #table, header"
    skeleton = SKELETON.replace("body *", ", ".join(f"{part} *" for part in parts.split(", ")))
    assert page.evaluate(skeleton) == calm.evaluate(skeleton)
    assert page.evaluate("window.broken") is None
    assert page.locator("a:not(.skip), img, iframe, object").count() == 0


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_window(visit, plain, width, scheme):
    page = visit(plain, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


@pytest.mark.parametrize(
    "rows", [[], [failed()], grid(lengths=(8,)), grid(layers=1, heads=0)], ids=len
)
def test_odd_studies_open(visit, rows, tmp_path):
    page = visit(render(study(tmp_path / "s", rows), tmp_path / "r.html"))
    assert page.locator("h2").count() >= 3


def test_two_studies_stand_side_by_side(visit, tmp_path):
    first, second = (
        study(tmp_path / "a", grid()),
        study(tmp_path / "b", grid(layers=1), model="other"),
    )
    page = visit(render(first, tmp_path / "r.html", second))
    assert page.locator("#comparison .js-plotly-plot").count() == 1
    left, right = (page.locator("#rough .pane").nth(i).bounding_box() for i in (0, 1))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]


def test_it_prints(visit, plain):
    pdf = visit(plain).pdf(format="A4")
    assert pdf.startswith(b"%PDF")


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_soon_interactive(visit, tmp_path):
    rows = grid(lengths=(8, 16, 32, 64, 128), layers=25, heads=19, samples=40)
    page = visit(render(study(tmp_path / "s", rows), tmp_path / "r.html"))
    assert page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 3000
    page.locator("#table input").fill("layer=24 n=128 sample=39")
    page.locator("#table .controls .note", has_text="of 20 rows").wait_for()
