"""The documentation site builds without a warning, and nothing on it needs the network.

MkDocs checks links, anchors and the navigation while it builds (`validation` in mkdocs.yml).
"""

import functools
import http.server
import importlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.once import once

ROOT = Path(__file__).resolve().parent.parent
NAMESPACES = [""] + [f".{name}" for name in ("attack", "dynamics", "mean_field", "nn", "theorems")]


def build(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`mkdocs build --strict` into `site`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    def run(place: Path) -> None:
        done = build(place)
        assert done.returncode == 0, done.stderr

    return once(tmp_path_factory, "site", run)


def fetched(html: str) -> list[str]:
    """The addresses elsewhere that a browser fetches by itself when it opens a page."""
    tags = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*>", html)
    # A canonical address is a statement, not a request.
    asked = [tag for tag in tags if not re.search(r'rel="?(?:canonical|next|prev)\b', tag)]
    return [tag for tag in asked if re.search(r'(?:href|src)="?(?:\w+:)?//', tag)]


def test_no_page_fetches_anything_from_the_network(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    assert {
        page.name: fetched(page.read_text()) for page in pages if fetched(page.read_text())
    } == {}
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style


@pytest.mark.parametrize("namespace", NAMESPACES, ids=lambda name: f"lipscope{name}")
def test_every_public_name_is_in_the_reference(site, namespace):
    module = importlib.import_module(f"lipscope{namespace}")
    page = site / "api" / f"{namespace.lstrip('.') or 'lipscope'}.html"
    anchors = set(re.findall(r'id="(lipscope[\w.]*)"', page.read_text()))
    names = set(module.__all__) - {name.lstrip(".") for name in NAMESPACES}
    # A table or a tuple of names has no docstring of its own, and no place on the page.
    names = {name for name in names if callable(getattr(module, name))}
    assert names and {f"lipscope{namespace}.{name}" for name in names} <= anchors


def test_examples_of_docstrings_are_code(site):
    page = (site / "api" / "lipscope.html").read_text()
    assert page.count("&gt;&gt;&gt;") > 20
    assert ":class:" not in page and ":func:" not in page


def test_notebooks_are_shown_with_their_outputs(site):
    pages = list((site / "notebooks").glob("*.html"))
    assert len(pages) == len(list((ROOT / "examples" / "notebooks").glob("*.ipynb")))
    shown = "".join(page.read_text() for page in pages)
    assert "nothing above" in shown and "figure made by the cell above" in shown
    assert len(list((site / "notebooks").glob("*.png"))) >= 3


def test_citations_lead_to_the_references(site):
    assert 'href="references.html#kim2021"' in (site / "notation.html").read_text()
    assert 'href="../references.html#castin2024"' in (site / "theory" / "bounds.html").read_text()
    assert 'id="kim2021"' in (site / "references.html").read_text()


def test_every_command_is_documented():
    from typer.main import get_command

    from lipscope.cli.commands import app

    page = (ROOT / "docs" / "command_line.md").read_text()
    commands = getattr(get_command(app), "commands")  # noqa: B009  (a typer group)
    listed = set(re.findall(r"^\| `lipscope ([\w-]+)", page, flags=re.MULTILINE))
    assert listed == set(commands)


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site without a line per request."""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser():
    programs = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    program = next(programs, None)
    if program is None:
        pytest.skip("no Chromium here")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize(
    "page", ["index.html", "api/lipscope.html", "notebooks/fragile_layers.html"]
)
@pytest.mark.parametrize("width", [1400, 390])
def test_a_page_in_a_browser(browser, address, page, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    tab, elsewhere, errors = context.new_page(), [], []
    tab.on(
        "request", lambda r: r.url.startswith((address, "data:", "blob:")) or elsewhere.append(r)
    )
    tab.on("pageerror", lambda error: errors.append(error))
    tab.goto(f"{address}/{page}")
    tab.wait_for_load_state("networkidle")
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.evaluate(wider) == 0, "the page scrolls sideways"
    assert not elsewhere and not errors
    context.close()


def test_search_works_without_the_network(browser, address):
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    tab = context.new_page()
    # The index is loaded in a worker of its own; keys typed before that are not lost, but a field
    # that is filled at once may be.
    tab.goto(f"{address}/index.html", wait_until="networkidle")
    tab.click("input[name=query]")
    tab.locator("input[name=query]").press_sequentially("local_lipschitz", delay=20)
    tab.wait_for_selector(".md-search-result__item a", timeout=120_000)
    assert "local_lipschitz" in tab.inner_text(".md-search-result__list")
    context.close()
