"""Every diff of docs/extending.md applies to the package, and the example after it then runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
STEPS = {
    heading: (diff, code)
    for heading, diff, code in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```\n(?:(?!^## ).)*?^```python\n(.*?)^```",
        PAGE,
        flags=re.M | re.S,
    )
}


def apply(diff: str, root: Path) -> list[Path]:
    """Apply a unified diff by its context, without line numbers; return the files it changes."""
    changed = []
    for part in re.split(r"^--- [^\n]*\n", diff, flags=re.M)[1:]:
        name, *lines = part.splitlines()
        path = root / name.removeprefix("+++ b/")
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for hunk in "\n".join(lines).split("@@\n")[1:]:
            rows = [row or " " for row in hunk.splitlines() if not row.startswith("@@")]
            old = "".join(f"{row[1:]}\n" for row in rows if row[0] in " -")
            new = "".join(f"{row[1:]}\n" for row in rows if row[0] in " +")
            assert text.count(old) == 1 if path.exists() else not old, f"{name}: {old}"
            text = text.replace(old, new) if path.exists() else new
        path.write_text(text, encoding="utf-8")
        changed.append(path)
    return changed


def test_the_page_shows_each_kind_of_extension():
    assert set(STEPS) == {"A probe", "A theorem", "An attack", "A scope"}


@pytest.mark.parametrize("kind", STEPS)
def test_a_diff_applies_and_its_example_runs(kind, tmp_path):
    diff, code = STEPS[kind]
    shutil.copytree(ROOT / "lipscope", tmp_path / "lipscope")
    new = len(list(tmp_path.rglob("*.py")))
    changed = apply(diff, tmp_path)
    added = [line for line in diff.splitlines() if re.match(r"\+(?!\+\+)", line)]
    assert added and len(changed) <= 2 and len(list(tmp_path.rglob("*.py"))) - new <= 1
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
