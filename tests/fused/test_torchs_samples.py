"""torch's own test samples for its attention, computed by lipscope's in its place.

Skipped where a version of torch comes without the samples, which are private.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fused.torchs_samples import CHECKS, MISSING
from tests.once import once

CASES = [f"{name}, {str(dtype)[6:]}" for name, (_, dtypes) in CHECKS.items() for dtype in dtypes]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def run(place: Path) -> None:
        command = [sys.executable, "-m", "tests.fused.torchs_samples", str(place / "report")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in (0, MISSING), done.stderr[-4000:]
        if done.returncode == MISSING:
            (place / "missing").write_text(done.stderr.strip())

    place = once(tmp_path_factory, "torchs_samples", run)
    if (place / "missing").exists():
        pytest.skip((place / "missing").read_text())
    return json.loads((place / "report").read_text())


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_torchs_samples(report: dict[str, Any], case: str) -> None:
    found = report[case]
    assert found["failed"] == []
    assert found["samples"] > 0
    # Otherwise torch would have been compared with itself.
    assert found["routed"] >= (0 if "dropout" in case else found["samples"])
