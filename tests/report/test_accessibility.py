"""The pages under axe-core in a real browser: no violation in any scheme or width."""

from pathlib import Path

import pytest

from lipscope.report.page import write_report
from tests.report.browsing import running_browser, visitor
from tests.report.made import bounded, grid, study, worst_found

axe = pytest.importorskip(
    "axe_playwright_python", reason="needs axe-core: pip install axe-playwright-python"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    place = tmp_path_factory.mktemp("pages")
    rows = grid(layers=3)
    around = {"bound: Castin et al., ball": 80.0, "bound: input-dependent": 2.0}
    full = study(place / "full", rows + bounded(rows, around) + worst_found(rows, 3.0))
    bare = study(place / "bare", [r._replace(value=r.value / 3, lower=0.0) for r in rows])
    return {
        "study": write_report(full, place / "study.html", against=bare),
        "bare": write_report(bare, place / "bare.html"),
        "comparison": write_report([full, bare, full], place / "comparison.html"),
    }


@pytest.mark.parametrize("name", ["study", "bare", "comparison"])
def test_no_rule_is_violated(pages, name):
    script = (Path(axe.__file__).parent / "axe.min.js").read_text()
    with running_browser() as browser, visitor(browser) as visit:
        for width in (1400, 390):
            for scheme in ("light", "dark"):
                page = visit(pages[name], width, scheme)
                # Through the debugger, not the page: its policy forbids scripts of others.
                page.evaluate(script)
                found = page.evaluate("axe.run()")["violations"]
                assert [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found] == []
