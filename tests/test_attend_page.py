"""The tables of docs/attend.md are those of the stored figures."""

import json
from pathlib import Path

from benchmarks.attend import RESULTS, error_table, table

ROOT = Path(__file__).parent.parent


def test_the_tables_are_the_stored_figures():
    result = json.loads((RESULTS / "attend_h200.json").read_text())
    page = (ROOT / "docs" / "attend.md").read_text()
    assert table(result) in page
    assert error_table(result) in page


def test_the_example_trains_alike():
    import argparse

    from examples import meanflow

    options = argparse.Namespace(steps=3, batch=2, points=8, device="cpu")
    curves = [meanflow.train(f, options) for f in (meanflow.ls.attend, meanflow.written_out)]
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-5
    assert curves[0][0] != curves[0][-1]
