"""The store keeps what it acknowledged, refuses what is not its study, and says so in words."""

import json
import math
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study.directory import APPLICATION_ID, FILE, OLDEST, SCHEMA, SCHEMA_VERSION
from lipscope.study.jobs import Command, Request
from lipscope.study.records import COLUMNS, Row, SampleTokens
from lipscope.study.salvage import MOST_PLACES, MOST_TOKENS, record_checksum, row_checksum
from lipscope.study.store import Store, _stored
from tests.study.fakes import info, row, sensitivity

ROOT = Path(__file__).resolve().parents[2]


def test_a_command_that_is_repeated_is_noted_once():
    asked = Request(groups=((8, (0, 1)),), layers=(0,), heads={0: (1,)}, scopes=("heads", "\ud800"))
    command = Command("measure", "lipscope measure", asked, "sigma")
    store = Store.create(None, info())
    for _ in range(2):
        store.add_commands([command, command])
    assert store.commands() == [command]


def test_what_was_written_is_read_back_exactly(tmp_path):
    rows = [
        row("heads", 1, 0, value=1 / 3),
        row(
            "heads",
            1,
            1,
            value=math.nan,
            lower=0.0,
            upper=math.inf,
            residual=math.nan,
            status="overflow",
        ),
        row("model", None, None, value=5e-324, lower=0.0, upper=math.inf),
        row("attention", 1, None, value=1e300, upper=math.inf),
    ]
    store = Store.create(tmp_path / "s", info())
    store.write(rows, [sensitivity(rows[0])])
    store.write_samples([SampleTokens(8, 0, ("=1+1", "\x1b[31m", "ü", "", "a", "b", "c", "d"))])
    store.close()
    again = Store.open(tmp_path / "s")
    assert again.info() == info()
    assert {repr(r) for r in again.rows()} == {repr(r) for r in rows}
    sample = again.sample(8, 0)
    assert sample is not None and sample.tokens[:3] == ("=1+1", "\x1b[31m", "ü")
    kept = again.sensitivity("heads", 1, 0, 8, 0)
    assert kept is not None and kept.right == pytest.approx(sensitivity(rows[0]).right, rel=1e-6)
    assert again.sensitivity("heads", 1, 1, 8, 0) is None
    assert list(again.sensitivities()) == [kept]


def test_rows_come_in_one_order_whenever_they_were_written(tmp_path):
    rows = [row(layer=layer, n=n, sample=s) for layer in range(3) for n in (8, 16) for s in (0, 1)]
    orders = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        store = Store.create(tmp_path / name, info())
        for r in order:
            store.write([r])
        orders.append(store.rows())
        store.close()
    assert orders[0] == orders[1]


def test_a_job_is_kept_whole_or_not_at_all(tmp_path):
    store = Store.create(tmp_path / "s", info())
    with pytest.raises(ValueError, match="a study cannot hold this row: lower <= value <= upper"):
        store.write([row(layer=0), row(layer=1, lower=9.0)])
    assert store.rows() == []
    with pytest.raises(TypeError):
        store.write([row(layer=0)], [sensitivity(row())._replace(right=("a",))])  # type: ignore[arg-type]  # on purpose
    assert store.rows() == []


def test_the_database_itself_enforces_the_order_of_the_bounds(tmp_path):
    store = Store.create(tmp_path / "s", info())
    store.write([row()])
    with pytest.raises(sqlite3.IntegrityError):
        store._db.execute("UPDATE rows SET upper = 0.5")


def test_writing_again_replaces_and_failed_rows_are_not_done(tmp_path):
    store = Store.create(tmp_path / "s", info())
    store.write([row(value=math.nan, lower=0.0, upper=math.inf, status="failed")])
    assert store.done("sigma") == set()
    store.write([row(), row(layer=None, scope="model")])
    store.write([row(), row(layer=None, scope="model")])
    assert store.done("sigma") == {("attention", 0, None, 8, 0), ("model", None, None, 8, 0)}
    assert len(store.rows()) == 2
    assert store.done("castin2024") == set()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weights": "v"}, "another model"),
        ({"text": "v"}, "another text"),
        ({"numeric_version": 2}, "another numeric version"),
        ({"tokenizer": "v"}, "another tokenizer"),
        ({"tol": 1e-3}, "tol = 1e-06, and this run has 0.001"),
        ({"seed": 7}, "seed = 0, and this run has 7"),
        ({"dtype": "float32"}, "dtype = float64, and this run has float32"),
        ({"special_tokens": True}, "special_tokens = False"),
    ],
)
def test_a_directory_is_one_study(tmp_path, changes, told):
    Store.create(tmp_path / "s", info()).close()
    with pytest.raises(UserError, match=told) as refused:
        Store.create(tmp_path / "s", info(**changes))
    assert "another --out" in str(refused.value)
    Store.create(tmp_path / "s", info()).close()


def test_one_writer_at_a_time(tmp_path):
    first = Store.create(tmp_path / "s", info())
    with pytest.raises(UserError, match="another run is writing"):
        Store.create(tmp_path / "s", info())
    Store.open(tmp_path / "s").close()
    first.close()
    Store.create(tmp_path / "s", info()).close()


def test_readers_see_what_a_living_writer_has_acknowledged(tmp_path):
    writer = Store.create(tmp_path / "s", info())
    writer.write([row()])
    reader = Store.open(tmp_path / "s")
    assert reader.rows() == [row()]
    writer.write([row(layer=1)])
    assert len(reader.rows()) == 2


def with_version(place: Path, version: int) -> None:
    Store.create(place, info()).close()
    with sqlite3.connect(place / FILE) as db:
        db.execute(f"PRAGMA user_version = {version}")


def broken(directory: Path, case: str) -> Path:
    """A directory that is no study, in one of many ways."""
    place = directory / case
    if case == "missing":
        return place
    if case == "a file":
        place.write_text("hello")
        return place
    place.mkdir()
    if case == "not sqlite":
        (place / FILE).write_text(
            "this is not a database, but it is long enough to look like one" * 20
        )
    elif case == "empty database":
        (place / FILE).touch()
    elif case == "foreign database":
        with sqlite3.connect(place / FILE) as db:
            db.execute("CREATE TABLE rows (a)")
    elif case == "newer":
        with_version(place, SCHEMA_VERSION + 1)
    elif case == "older":
        with_version(place, OLDEST - 1)
    elif case == "truncated":
        Store.create(place, info()).close()
        (place / FILE).write_bytes((place / FILE).read_bytes()[:5000])
    return place


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("missing", "does not exist"),
        ("a file", "is not a study"),
        ("empty", "is not a study"),
        ("not sqlite", "is not a study"),
        ("empty database", "is not a study"),
        ("foreign database", "is not a study"),
        ("newer", rf"newer lipscope \(schema {SCHEMA_VERSION + 1}"),
        ("older", rf"older lipscope \(schema {OLDEST - 1}"),
    ],
)
def test_what_is_not_a_study_is_told(tmp_path, case, told):
    with pytest.raises(UserError, match=told):
        Store.open(broken(tmp_path, case)).rows()


@pytest.mark.parametrize(
    "case", ["a file", "not sqlite", "foreign database", "newer", "older", "truncated"]
)
def test_what_is_not_a_study_is_not_written_to(tmp_path, case):
    place = broken(tmp_path, case)
    before = place.read_bytes() if place.is_file() else (place / FILE).read_bytes()
    with pytest.raises(UserError):
        Store.create(place, info())
    assert before == (place.read_bytes() if place.is_file() else (place / FILE).read_bytes())


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"neither a study nor empty \(it contains thesis.tex\)"):
        Store.create(tmp_path, info())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_start_that_was_cut_short_is_begun_again(tmp_path):
    place = broken(tmp_path, "empty database")
    store = Store.create(place, info())
    store.write([row()])
    assert store.rows() == [row()]


def test_a_study_is_one_plain_file_after_every_write(tmp_path):
    def names():
        found = {path.name for path in (tmp_path / "s").iterdir()}
        return found - {"study.lock"}  # older versions of filelock remove it

    store = Store.create(tmp_path / "s", info())
    for layer in range(3):
        store.write([row(layer=layer)])
        assert names() == {FILE}
        copy = tmp_path / f"copy{layer}"
        copy.mkdir()
        (copy / FILE).write_bytes((tmp_path / "s" / FILE).read_bytes())
        assert len(Store.open(copy).rows()) == layer + 1
    del store  # neither closed nor killed: collected
    assert len(Store.open(tmp_path / "s").rows()) == 3
    assert names() == {FILE}


def test_a_study_on_read_only_media_is_read(tmp_path):
    store = Store.create(tmp_path / "s", info())
    store.write([row()])
    store.close()
    (tmp_path / "s" / FILE).chmod(0o444)
    (tmp_path / "s").chmod(0o555)
    try:
        assert Store.open(tmp_path / "s").rows() == [row()]
    finally:
        (tmp_path / "s").chmod(0o755)


def test_a_journal_is_rolled_back_by_the_next_writer_and_by_no_reader(tmp_path):
    """A writer killed inside a transaction: the pages it had written are undone."""
    code = (
        "import os, sys; from pathlib import Path; from tests.study.fakes import info, row\n"
        "from lipscope.study.store import Store\n"
        "store = Store.create(Path(sys.argv[1]), info()); store.write([row()])\n"
        "store._db.execute('PRAGMA cache_spill = 1'); store._db.execute('PRAGMA cache_size = 1')\n"
        "store._db.execute('BEGIN IMMEDIATE')\n"
        "for i in range(2000): store._put([('kind', str(i), 'x' * 500)])\n"
        "os._exit(9)"
    )
    place = tmp_path / "s"
    subprocess.run([sys.executable, "-c", code, str(place)], check=False, cwd=ROOT)
    assert (place / f"{FILE}-journal").exists()
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with pytest.raises(UserError, match=r"was killed.*repeat the command.*--out .*/s, which resum"):
        Store.open(place)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    store = Store.create(place, info())
    assert store.rows() == [row()] and store.records("kind") == [] and store.check() == []
    assert not (place / f"{FILE}-journal").exists()


def test_a_full_disk_is_told_and_costs_nothing_that_was_kept(tmp_path):
    store = Store.create(tmp_path / "s", info())
    store.write([row()])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(UserError, match="disk is full"):
        store.write([row(layer=layer) for layer in range(1000)])
    assert store.rows() == [row()]
    store.close()
    assert Store.open(tmp_path / "s").rows() == [row()]


def test_a_commit_is_on_disk_when_it_returns(tmp_path):
    """EXTRA, which is 3: also the name of the journal is gone from the folder on disk."""
    store = Store.create(tmp_path / "s", info())
    assert store._db.execute("PRAGMA synchronous").fetchone() == (3,)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 0},
        {"n": 2**40},
        {"sample": -1},
        {"layer": 10**6},
        {"head": -2},
        {"radius": -1.0},
        {"scope": "x" * 2000},
    ],
)
def test_a_row_out_of_range_is_not_written(tmp_path, change):
    store = Store.create(None, info())
    with pytest.raises(ValueError, match="a study cannot hold this row: lower <= value <= upper"):
        store.write([row(layer=1), row()._replace(**change)])
    assert store.rows() == []


def test_in_memory(tmp_path):
    store = Store.create(None, info())
    store.write([row()], [sensitivity(row())])
    assert store.rows() == [row()] and store.info() == info()


def older(directory, store) -> None:
    """Write a store in memory as schema 2: the status with its reason, the format as the scope."""
    statement = SCHEMA[0].replace("\n    reason TEXT NOT NULL, extra TEXT NOT NULL,", "")
    directory.mkdir()
    with closing(sqlite3.connect(directory / FILE)) as db:
        for line in (statement, *SCHEMA[1:]):
            db.execute(line)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute("PRAGMA user_version = 2")
        for one in store.rows():
            record = list(_stored(one)[:-2])
            record[12] = one.explained
            if "format" in one.extra:
                record[0], record[1] = "budget", one.extra["format"]
                record[11] = one.extra["second_order"]
            db.execute(
                f"INSERT INTO rows VALUES ({', '.join('?' * 18)})",
                (*record, row_checksum(tuple(record))),
            )
        for record in store.all_records():
            db.execute(
                "INSERT INTO records VALUES (?, ?, ?, ?)", (*record, record_checksum(record))
            )
        db.commit()


def test_a_study_of_schema_2_is_read_merged_and_not_written_to(tmp_path, capsys):
    store = Store.create(None, info())
    budget = row("model", None, probe="budget: int8", kind="total", residual=math.nan)
    rows = [
        row(reason="gap not reached"),
        row(layer=1, value=math.nan, lower=0.0, upper=math.inf, status="failed", reason="memory"),
        budget._replace(extra={"format": "int8", "second_order": 0.25}),
    ]
    store.write(rows, [sensitivity(rows[0])])
    older(tmp_path / "old", store)
    before = (tmp_path / "old" / FILE).read_bytes()
    found = Store.open(tmp_path / "old")
    assert repr(found.rows()) == repr(store.rows()) and not found.check()
    assert found.sensitivities() == store.sensitivities() and found.info() == store.info()
    with pytest.raises(UserError, match=r"older lipscope \(schema 2.*`lipscope merge NEW"):
        Store.create(tmp_path / "old", info())
    assert main(["merge", str(tmp_path / "new"), str(tmp_path / "old")]) == 0
    assert repr(Store.open(tmp_path / "new").rows()) == repr(store.rows())
    Store.create(tmp_path / "new", info()).close()
    assert (tmp_path / "old" / FILE).read_bytes() == before
    (tmp_path / "old" / FILE).write_bytes(before.replace(b"gap not reached", b"gap has reached"))
    with pytest.raises(UserError, match="is damaged, and of an older schema"):
        Store.open(tmp_path / "old")


# Every character, lone surrogates and NUL included.
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
FLOAT = st.floats()  # NaN, infinities, -0.0 and subnormal numbers included
NUMBER = st.integers(0, 2**40)
LAYER = st.integers(0, MOST_PLACES)
PLACE = st.none() | LAYER
LENGTH = st.integers(1, MOST_TOKENS)
# These have types of their own.
TYPED = {"settings", "detail", "format", "order", "not_offered"}
KEY = st.text().filter(lambda key: key not in TYPED)
EXTRA = st.dictionaries(KEY, st.none() | st.integers() | st.text())
NORM = st.floats(0, 1, width=32)


@st.composite
def rows(draw) -> Row:
    """Any row that is allowed to exist."""
    lower, value, upper = sorted(draw(st.floats(allow_nan=False)) for _ in range(3))
    missing = draw(st.booleans())
    return Row(
        probe=draw(TEXT),
        scope=draw(TEXT),
        layer=draw(PLACE),
        head=draw(PLACE),
        n=draw(LENGTH),
        sample=draw(NUMBER),
        kind=draw(TEXT),
        norm=draw(TEXT),
        value=math.nan if missing else value,
        lower=lower,
        upper=upper,
        residual=draw(FLOAT),
        status="failed" if missing else draw(TEXT),
        radius=abs(draw(FLOAT)),
        dtype=draw(TEXT),
        device=draw(TEXT),
        seconds=abs(draw(FLOAT)),
        reason=draw(TEXT),
        extra=draw(EXTRA),
    )


def plain(one: Row) -> str:
    """What may be expected back: zeros without a sign, and text that UTF-8 can hold."""
    return repr(
        tuple(
            x.encode("utf-8", "backslashreplace").decode()
            if isinstance(x, str)
            else x + 0.0
            if isinstance(x, float)
            else x
            for x in one
        )
    )


def key(one: Row) -> str:
    return plain(one._replace(**dict.fromkeys(COLUMNS[8:], 0.0)))


@pytest.mark.wide
@settings(max_examples=200, deadline=None)
@given(st.lists(rows(), max_size=6, unique_by=key))
def test_any_rows_come_back(given_rows):
    store = Store.create(None, info())
    store.write(given_rows)
    found = sorted(repr(tuple(r)) for r in store.rows())
    assert found == sorted(map(plain, given_rows)) and store.check() == []


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
        lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
        max_leaves=12,
    )
)
def test_facts_of_any_shape_are_read(facts):
    """What a stranger or a broken lipscope wrote about a study: no crash, and the rows stay."""
    store = Store.create(None, info())
    store.write([row()])
    for name in ("identity", "about", "commands"):
        record = ("info", name, json.dumps(facts))
        store._db.execute(
            "UPDATE records SET value = ?, crc = ? WHERE key = ?",
            (record[2], record_checksum(record), name),
        )
    found = store.info()
    assert isinstance(found.about.model, str) and isinstance(found.about.scopes, dict)
    assert store.rows() == [row()] and isinstance(store.commands(), list)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*COLUMNS, "crc"]),
    st.none() | st.integers(-(2**60), 2**60) | FLOAT | TEXT | st.binary(max_size=9),
)
def test_a_change_behind_the_back_costs_that_row_alone(column, value):
    store = Store.create(None, info())
    store.write([row(layer=0), row(layer=1), row(layer=2)])
    before = {r.layer: repr(r) for r in store.rows()}
    try:
        store._db.execute(f"UPDATE rows SET {column} = ? WHERE layer = 1", (value,))
    except (sqlite3.Error, UnicodeError, OverflowError):
        return  # the schema refuses it
    found = {repr(r) for r in store.rows()}
    kept = {before[0], before[2]}
    # SQLite may convert the value to the very one that was there.
    assert (found == kept and len(store.lost) == 1) or (
        found == {*kept, before[1]} and not store.lost
    )
