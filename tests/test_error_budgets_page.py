"""The tables of docs/error_budgets.md are those of the stored figures."""

import json
from pathlib import Path

from benchmarks.error_budgets import RESULTS, long_table, runs_table

PAGE = Path(__file__).parent.parent / "docs" / "error_budgets.md"


def test_the_tables_are_the_stored_figures():
    results, page = json.loads(RESULTS.read_text()), PAGE.read_text()
    assert runs_table(results) in page
    assert long_table(results) in page


def test_a_table_has_the_extremes_of_all_states():
    results = {
        "train/a": {"last": 1.5},
        "train/b": {"last": 2.0},
        "runs/a/bf16/64": {"ratios": [1.0, 0.9]},
        "runs/b/bf16/64": {"ratios": [5.0]},
        "runs/a/fp16/128": {"ratios": [1.2, 1.1]},
        "long/8": {"n": 4096, "heads": 6, "seconds": 1.04, "GiB": 2.04, "bytes per token": 1234.5},
    }
    rows = runs_table(results).splitlines()[2:]
    assert rows[0] == "| a | 1.50 | 64, 128 | 2 | 4 | 0.90 to 1.20 |"
    assert rows[1] == "| b | 2.00 | 64 | 1 | 1 | 5.00 to 5.00 |"
    assert long_table(results).splitlines()[2:] == ["| 4,096 | 6 | 1.0 | 2.0 | 1,234 |"]
