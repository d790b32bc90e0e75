"""The README says how to install and test, and links on every page lead somewhere."""

import re
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
