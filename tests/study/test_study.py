"""A study is read back, fitted and shown; what strangers wrote in it stays harmless."""

import csv
import io
import json
import math
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from lipscope._files import for_spreadsheet, for_terminal
from lipscope._types import UserError
from lipscope.study.export import write_csv, write_parquet
from lipscope.study.jobs import Command, Request
from lipscope.study.records import COLUMNS, Row, SampleTokens
from lipscope.study.store import Store
from lipscope.study.study import SUBJECT_COLUMNS, Study, merge
from tests.study.fakes import info, row, sensitivity
from tests.study.printed import shown

HOSTILE = (
    "=cmd|' /C calc'!A0",
    "\x1b]0;owned\x07\x1b[2J",
    "\u202eevil",
    "[red]markup[/red]",
    "+1",
    "@x",
    "\ttab",
    "a\nb",
)


def sigma(layer: int, n: int, sample: int, head: int | None = None) -> float:
    return (1 + layer) * n**0.25 * (1 + 0.01 * sample) * (1 if head is None else 0.5 + 0.1 * head)


@pytest.fixture
def study(tmp_path) -> Study:
    store = Store.create(tmp_path / "s", info())
    for n in (8, 16, 32):
        store.write_samples([SampleTokens(n, s, (HOSTILE * 4)[:n]) for s in range(2)])
        for layer in range(3):
            for s in range(2):
                rows = [
                    row("heads", layer, h, n, s, sigma(layer, n, s, h), radius=float(n))
                    for h in range(2)
                ]
                rows += [row("attention", layer, None, n, s, sigma(layer, n, s), radius=float(n))]
                store.write(rows, [sensitivity(r) for r in rows])
    store.write(
        [
            row(
                layer=1,
                n=32,
                sample=9,
                value=math.nan,
                lower=0.0,
                upper=math.inf,
                status="failed",
                reason="no\x1b[5m",
            )
        ]
    )
    store.close()
    return Study.open(tmp_path / "s")


def test_growth_per_layer_and_scope_counts_heads_by_their_largest(study):
    laws = {(law.scope, law.layer): law for law in study.growth()}
    assert list(laws) == [(scope, layer) for layer in range(3) for scope in ("heads", "attention")]
    for (scope, layer), law in laws.items():
        assert law.alpha == pytest.approx(0.25, abs=1e-12)
        assert (
            pytest.approx((1 + layer) * 1.005 * (0.6 if scope == "heads" else 1), rel=1e-3) == law.C
        )
        assert law.points == 6


def test_growth_refuses_two_lengths():
    store = Store.create(None, info())
    store.write([row(n=8), row(n=16)])
    with pytest.raises(UserError, match="at least 3 lengths"):
        Study(store).growth()
    assert "a fit needs at least 3 lengths" in shown_without_tokens(Study(store))


def shown_without_tokens(study: Study) -> str:
    for r in study.sigma:
        study.store.write([r], [sensitivity(r)])
    return shown(study)


def test_tokens_of_the_most_sensitive_sample(study):
    tokens = study.tokens(2)
    assert len(tokens) == 32 and [t.position for t in tokens] == list(range(32))
    assert tokens[0].token == HOSTILE[0]
    assert math.fsum(t.right**2 for t in tokens) == pytest.approx(1, abs=1e-6)
    assert (
        max(tokens, key=lambda t: t.right).position == 31
    )  # the fake's norms rise along the sample
    assert max(tokens, key=lambda t: t.left).position == 0
    assert len(study.tokens(0, "heads", n=8, sample=1, head=0)) == 8
    assert study.peak()[1:6] == ("attention", 2, None, 32, 1)


def test_tokens_are_those_of_all_heads_together_unless_heads_are_asked_for():
    store = Store.create(None, info())
    one, together = row("heads", head=0, value=9.0), row("attention", value=2.0)
    told = sensitivity(together)
    store.write([one, together], [sensitivity(one), told._replace(right=told.left)])
    study = Study(store)
    assert [t.right for t in study.tokens(0)] == pytest.approx(told.left)
    assert [t.right for t in study.tokens(0, "heads")] == pytest.approx(told.right)


def test_the_peak_is_in_a_layer_if_one_was_measured():
    head, whole = row("heads", head=0, value=2.0), row("model", layer=None, value=9.0)
    for rows, peak in (([head, whole], head), ([whole], whole)):
        store = Store.create(None, info())
        store.write(rows)
        assert Study(store).peak() == peak


@pytest.mark.parametrize(
    "wanted", [{"layer": 7}, {"layer": 1, "n": 9}, {"layer": 1, "scope": "block"}]
)
def test_tokens_of_what_was_not_measured(study, wanted):
    with pytest.raises(UserError, match="measured"):
        study.tokens(**wanted)


def test_dataframe(study):
    frame = study.to_dataframe()
    assert tuple(frame.columns) == (*COLUMNS, *SUBJECT_COLUMNS) and len(frame) == 55
    subject = frame[list(SUBJECT_COLUMNS)].drop_duplicates().values.tolist()
    assert subject == [["fake/model", "none", "w" * 12, "a text"]]
    assert str(frame["head"].dtype) == "Int64" and frame["head"].isna().sum() == 19
    heads = frame[
        (frame.scope == "heads") & (frame.n == 32) & (frame["sample"] == 1) & (frame["head"] == 1)
    ]
    assert list(heads.value) == [sigma(layer, 32, 1, 1) for layer in range(3)]


def test_dataframe_without_pandas_names_the_extra(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"lipscope\[data\]"):
        study.to_dataframe()


def test_csv_reads_back_to_the_same_rows(study):
    out = io.StringIO()
    write_csv(study, out)
    header, *lines = csv.reader(io.StringIO(out.getvalue()))
    assert tuple(header) == (*COLUMNS, *SUBJECT_COLUMNS)
    assert {tuple(line[len(COLUMNS) :]) for line in lines} == {study.subject}
    numbers: dict[str, type] = {"layer": int, "head": int, "n": int, "sample": int}
    numbers |= dict.fromkeys(("value", "lower", "upper", "residual", "radius", "seconds"), float)

    def read(column: str, cell: str) -> Any:
        if column in ("reason", "extra"):
            return cell if column == "reason" else json.loads(cell or "{}")
        return None if cell == "" else numbers.get(column, str)(cell)

    back = [Row._make(map(read, COLUMNS, line[: len(COLUMNS)])) for line in lines]
    assert [repr(r) for r in back] == [repr(r) for r in study.rows]


def test_csv_of_tokens_runs_no_formula(study):
    out = io.StringIO()
    write_csv(study, out, tokens=True)
    lines = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert len(lines) == 2 * 3 * 3 * (8 + 16 + 32)
    found = {line["token"] for line in lines}
    assert "'=cmd|' /C calc'!A0" in found and "'+1" in found and "a\nb" in found
    assert not any(token.lstrip()[:1] in ("=", "+", "-", "@") for token in found)


def test_parquet_reads_back(study, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    write_parquet(study, tmp_path / "rows.parquet")
    write_parquet(study, tmp_path / "tokens.parquet", tokens=True)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    kept = [repr(Row(**{name: r[name] for name in COLUMNS})._replace(extra={})) for r in rows]
    assert kept == [repr(r) for r in study.rows] and rows[0]["text"] == "a text"
    assert pq.read_table(tmp_path / "tokens.parquet")["token"][0].as_py() == HOSTILE[0]


def test_the_summary_fits_80_columns_and_says_it_all(study):
    text = shown(study)
    assert max(len(line) for line in text.splitlines()) <= 80
    for piece in (
        "fake/model on a text",
        "σ at n = 32",
        "0.25 [0.24, 0.26]",
        "8 → 32",
        "layer 2 (attention)",
    ):
        assert piece in text
    assert "Without a value: 1 row; the first reason: failed: no\\x1b[5m" in text.replace("\n", " ")


def test_no_token_drives_the_terminal(study):
    text = shown(study)
    assert not any(c != "\n" and not c.isprintable() for c in text)


def test_a_study_with_nothing_or_only_failures_still_shows():
    store = Store.create(None, info())
    assert "No value has been measured yet" in shown(Study(store))
    store.write([row(value=math.nan, lower=0.0, upper=math.inf, status="non_finite")])
    assert "Without a value: 1 row; the first reason: non_finite" in shown(Study(store))
    assert Study(store).growth() == []


def test_repr(study):
    assert repr(study).startswith("Study(fake/model: 54 values, 1 failed, n = 8 to 32 in ")


def test_printable():
    assert (
        for_terminal("naïve 日本 \x1b\u202e\u0007\ud800") == "naïve 日本 \\x1b\\u202e\\x07\\ud800"
    )
    assert for_terminal("x" * 99, 10) == "x" * 9 + "…"
    assert [for_spreadsheet(t) for t in ("=1", " =1", "-1", "\t", "ok", "")] == [
        "'=1",
        "' =1",
        "'-1",
        "'\t",
        "ok",
        "",
    ]


def test_a_study_travels_in_a_pickle(study):
    again = pickle.loads(pickle.dumps(study))
    assert again.directory == study.directory and again.rows == study.rows
    inside = merge([study])
    there = pickle.loads(pickle.dumps(inside))
    assert there.directory is None and there.info == inside.info
    assert repr(there.rows) == repr(study.rows)
    assert list(there.token_records()) == list(study.token_records())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(repr, inside).result() == repr(inside)


def test_save_writes_all_of_it_to_a_new_directory(study, tmp_path):
    copy = merge([study]).save(tmp_path / "copy")
    assert copy.directory == tmp_path / "copy" and copy.info == study.info
    assert repr(copy.rows) == repr(study.rows)
    assert list(copy.token_records()) == list(study.token_records())
    for taken in (tmp_path / "copy", tmp_path):
        with pytest.raises(UserError, match=r"holds a study|neither a study nor empty"):
            study.save(taken)


def part(layers: range, **changes: Any) -> Study:
    store = Store.create(None, info(**changes))
    rows = [row(layer=layer, n=n) for layer in layers for n in (8, 16)]
    store.write(rows, [sensitivity(r) for r in rows])
    store.write_samples([SampleTokens(n, 0, tuple("ab" * (n // 2))) for n in (8, 16)])
    return Study(store)


def test_parts_join_to_the_whole_and_the_first_counts():
    whole, first, second = part(range(4)), part(range(2)), part(range(1, 4))
    second.store.write([row(layer=1, n=8, value=77.0)])
    joined = merge([first, second])
    assert joined.rows == whole.rows
    assert list(joined.token_records()) == list(whole.token_records())
    failed = part(range(0))
    failed.store.write([row(n=8, value=math.nan, lower=0.0, upper=math.inf, status="failed")])
    assert merge([failed, whole]).rows == whole.rows == merge([whole, failed]).rows


def test_studies_of_different_things_do_not_join():
    with pytest.raises(UserError, match=r"differ in weights, seed, .*to_dataframe\(\)"):
        merge([part(range(2)), part(range(2), weights="v", seed=5)])
    with pytest.raises(UserError, match="at least one Study"):
        merge([])


ASKED = Request(((8, (0,)), (16, (0,))), (0, 1), {0: (0, 1), 1: (0, 1)}, ("attention",))


def test_an_interrupted_study_counts_its_jobs():
    store = Store.create(None, info(), Command("measure", "lipscope measure", ASKED))
    study = Study(store)
    assert study.jobs == (0, 4) and study.unfinished == "0 of 4 jobs are done"
    store.write([row(layer=0, n=8), row(layer=1, n=8)])
    assert Study(store).jobs == (2, 4)
    # More scopes at the same places are the same jobs, and not done before all rows are there.
    more = Request(**{**vars(ASKED), "scopes": ("heads", "attention")})
    store.add_commands([Command("measure", "lipscope measure --scope heads", more)])
    assert Study(store).jobs == (0, 4)
    store.write([row("heads", 0, head, 8) for head in (0, 1)])
    assert Study(store).unfinished == "1 of 4 jobs are done"
    # The rows of another command at these places are jobs of their own.
    store.add_commands([Command("bounds", "lipscope bounds", ASKED, "worst found")])
    assert Study(store).jobs == (1, 8)
    store.write([row(layer=0, n=8, probe="worst found")])
    assert Study(store).jobs == (2, 8)


def test_commands_are_listed_once_and_without_those_that_another_one_includes():
    store = Store.create(None, info(), Command("measure", "a", ASKED))
    larger = Request(**{**vars(ASKED), "scopes": ("heads", "attention")})
    other = Request(**{**vars(ASKED), "scopes": ("block",)})
    for command in (
        Command("measure", "a", ASKED),
        Command("bounds", "b", ASKED, "worst found"),
        Command("measure", "c", larger),
        Command("measure", "d", other),
        Command("measure", "", other),
        Command("measure", "smaller", Request(**{**vars(larger), "layers": (1,)})),
        Command("measure", "again", other),
    ):
        store.add_commands([command])
    assert [c.line for c in store.commands()] == ["a", "b", "c", "d", "", "smaller", "again"]
    assert Study(store).commands == ["b", "c", "again"]
    assert Study(store).info.about.command == "b\nc\nagain"


def test_csv_on_a_terminal_and_in_a_file(study):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown_there, in_file = Terminal(), io.StringIO()
    for out in (shown_there, in_file):
        write_csv(study, out, tokens=True)
    assert "\x1b" in in_file.getvalue() and "\\x1b" in shown_there.getvalue()
    assert all(c == "\n" or c.isprintable() for c in shown_there.getvalue())


def test_text_from_a_file_never_reaches_a_terminal_raw():
    store = Store.create(None, info(dtype="float64\x1b[31m"))
    rows = [row("attention\x1b[5m", n=n) for n in (8, 16, 32)]
    store.write(rows, [sensitivity(r) for r in rows])
    assert "\x1b" not in shown(Study(store))


def test_every_solve_counts_in_the_joint_confidence(tmp_path):
    """A union bound over all certified rows, those of searches for the worst input included."""
    store = Store.create(None, info())  # each bound fails with probability 1e-9
    store.write(
        [
            *(row(layer=layer) for layer in range(3)),
            *(row(layer=layer, probe="worst found") for layer in range(4)),
            row(layer=5, upper=math.inf),
            row(layer=6, probe="bound: ball", kind="upper"),
            row(layer=7, value=math.nan, lower=0.0, upper=math.inf, status="overflow"),
        ]
    )
    assert Study(store).joint_failure == 7e-9
    assert len(Study(store).certified) == 7
