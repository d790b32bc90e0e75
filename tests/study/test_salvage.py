"""What is intact in a damaged file is read, and what is lost is named; checked on real pages."""

import math
import sqlite3
import struct
import zlib
from collections import Counter

import pytest

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study import salvage
from lipscope.study.directory import FILE
from lipscope.study.records import SampleTokens
from lipscope.study.salvage import ABOUT, NORMS
from lipscope.study.store import Store, _stored, damage
from lipscope.study.study import DamageWarning, Study
from tests.study.damage import BAD, campaign, damaged, make
from tests.study.fakes import info, row, sensitivity


@pytest.fixture
def place(tmp_path):
    """A study of 300 rows over many pages."""
    store = Store.create(tmp_path / "s", info())
    rows = [row(layer=i % 30, sample=i // 30, value=1 + i / 7) for i in range(300)]
    store.write(rows, [sensitivity(r) for r in rows])
    store.write_samples([SampleTokens(8, i, tuple("abcdefgh")) for i in range(10)])
    store.close()
    return tmp_path / "s"


def edit(place, *statements: str) -> None:
    """Change the file as another program, or a failing disk, would."""
    db = sqlite3.connect(place / FILE)
    db.execute("PRAGMA writable_schema = 1")
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def pages_of(place, table: str) -> list[int]:
    """The leaf pages of a table or index, by their first byte: 13 in a table, 10 in an index."""
    db = sqlite3.connect(place / FILE)
    size = db.execute("PRAGMA page_size").fetchone()[0]
    (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    db.close()
    content, found, todo = (place / FILE).read_bytes(), [], [root]
    while todo:
        page = todo.pop()
        base = (page - 1) * size
        if content[base] in (13, 10):
            found.append(page)
            continue
        (cells,) = struct.unpack(">H", content[base + 3 : base + 5])
        for i in range(cells):
            (at,) = struct.unpack(">H", content[base + 12 + 2 * i : base + 14 + 2 * i])
            todo += struct.unpack(">I", content[base + at : base + at + 4])
        todo += struct.unpack(">I", content[base + 8 : base + 12])
    return found


def zero_page(place, page: int) -> None:
    with open(place / FILE, "r+b") as file:
        size = struct.unpack(">H", file.read(18)[16:])[0]
        file.seek((page - 1) * size)
        file.write(bytes(size))


def test_the_checksum_of_a_row_is_as_documented():
    one = row(value=math.nan, lower=0.0, upper=math.inf, status="failed", layer=None, reason="ü")
    texts = b"\0".join(
        [b"sigma", b"attention", b"local", b"2", b"failed", b"float64", b"cpu", b"\xc3\xbc", b"{}"]
    )
    numbers = struct.pack(
        "<4q6d", -1, -1, 8, 0, math.nan, 0.0, math.inf, one.residual, one.radius, one.seconds
    )
    assert salvage.row_checksum(_stored(one)) == zlib.crc32(texts + numbers)
    assert salvage.record_checksum(("a", "b", b"c")) == zlib.crc32(b"a\0b\0c")
    assert salvage.record_checksum(("a", "b", "ü")) == zlib.crc32("a\0b\0ü".encode())
    assert salvage.record_checksum(("a", None, 5)) == -1


def test_nothing_is_lost_of_an_intact_study(place):
    store = Store.open(place)
    assert len(store.rows()) == 300 and store.check() == [] and damage(store) == ""


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_lost_page_costs_its_rows_and_names_them(place, which):
    whole = {row[:8]: row for row in Store.open(place).rows()}
    zero_page(place, pages_of(place, "rows")[which])
    store = Store.open(place)
    left = {row[:8]: row for row in store.rows()}
    assert 200 < len(left) < 300 and all(whole[key] == row for key, row in left.items())
    gone = sorted(
        f"sigma of attention, layer {key[2]}, n = 8, sample {key[5]}"
        for key in whole.keys() - left.keys()
    )
    assert sorted(store.lost) == gone
    assert f"; and {len(gone) - 3} more; the rest is intact" in damage(store)


def test_a_row_that_has_vanished_without_a_trace_is_missed(place):
    """One cell fewer in a leaf page: SQLite reads on without an error."""
    page = pages_of(place, "rows")[0]
    with open(place / FILE, "r+b") as file:
        size = struct.unpack(">H", file.read(18)[16:])[0]
        file.seek((page - 1) * size + 3)
        (cells,) = struct.unpack(">H", file.read(2))
        file.seek((page - 1) * size + 3)
        file.write(struct.pack(">H", cells - 1))
    store = Store.open(place)
    assert len(store.rows()) == 299
    assert len(store.lost) == 1 and store.lost[0].startswith("sigma of attention, layer ")


def test_a_lost_page_of_the_index_costs_no_row(place):
    whole = Store.open(place).rows()
    zero_page(place, pages_of(place, "rows_key")[0])
    store = Store.open(place)
    assert store.rows() == whole
    assert store.lost == ["the index of the rows, but none of them"]


def test_the_index_of_records_is_not_trusted_to_say_that_one_is_missing(place):
    for page in pages_of(place, "records_key"):
        zero_page(place, page)
    store = Store.open(place)
    sample = store.sample(8, 3)
    assert sample is not None and sample.tokens == tuple("abcdefgh")
    assert store.sensitivity("attention", 3, None, 8, 0) is not None and store.lost


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ("UPDATE rows SET value = lower WHERE layer = 3 AND sample = 2", 1),
        ("UPDATE rows SET scope = 'heads' WHERE layer = 3 AND sample = 2", 1),
        ("UPDATE rows SET status = CAST(x'ff' AS TEXT) WHERE layer = 3", 10),
        ("UPDATE rows SET n = 'many' WHERE layer = 3", 10),
        ("DELETE FROM rows WHERE layer = 3", 0),  # as its owner may: index and table agree
    ],
)
def test_an_edited_row_does_not_count(place, change, lost):
    edit(place, change)
    store = Store.open(place)
    assert len(store.rows()) == (290 if "DELETE" in change else 300 - lost)
    assert len(store.lost) == lost


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET value = CAST(x'ff' AS TEXT) WHERE kind = 'tokens'",
        "UPDATE records SET value = '[1, 2]' WHERE kind = 'tokens'",
        "UPDATE records SET kind = x'ff00' WHERE kind = 'tokens'",
        "UPDATE records SET value = 5 WHERE kind = 'token norms'",
        "UPDATE records SET key = 'x' || key WHERE kind = 'token norms'",
        "UPDATE records SET value = zeroblob(3) WHERE kind = 'info'",
    ],
)
def test_an_edited_record_is_lost_and_the_rows_stay(place, change):
    edit(place, change)
    store = Store.open(place)
    assert len(store.rows()) == 300 and store.check()
    assert ("'tokens'" in change) == (store.sample(8, 0) in (None, SampleTokens(8, 0, ())))
    assert isinstance(store.info().about.model, str)


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE rows",
        "DROP INDEX rows_key",
        "ALTER TABLE rows RENAME COLUMN value TO worth",
        "UPDATE sqlite_master SET sql = CAST(replace(sql, 'value', x'ff') AS TEXT)",
        "UPDATE sqlite_master SET sql = 'CREATE TABLE rows (a)' WHERE name = 'rows'",
        "DELETE FROM sqlite_master",
    ],
)
def test_tables_that_are_not_as_written(place, change):
    edit(place, change)
    store = Store.open(place)
    try:
        rows = store.rows()
    except UserError as error:
        assert "damaged" in str(error)
        return
    assert len(rows) == 300 or store.lost


def test_a_damaged_study_is_not_written_to(place):
    zero_page(place, pages_of(place, "rows")[0])
    before = (place / FILE).read_bytes()
    with pytest.raises(UserError, match=r"is damaged: lost .*doctor .* --repair"):
        Store.create(place, info())
    assert (place / FILE).read_bytes() == before


def test_a_locked_study_is_not_a_damaged_one(place):
    db = sqlite3.connect(place / FILE, isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    store = Store(sqlite3.connect(place / FILE, timeout=0), place)
    with pytest.raises(UserError, match=r"cannot use the study .*locked"):
        store.rows()
    db.execute("ROLLBACK")
    assert len(store.rows()) == 300 and not store.lost


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [
        ("PERM", False), ("BUSY", False), ("LOCKED", False), ("READONLY", False),
        ("INTERRUPT", False), ("IOERR", False), ("FULL", False), ("CANTOPEN", False),
        ("AUTH", False), ("IOERR_SHORT_READ", True), ("CORRUPT", True), ("NOTADB", True),
        ("ERROR", True), ("ABORT", True),
    ],
)  # fmt: skip
def test_what_the_surroundings_do_is_not_damage(kind, damaged):
    error = sqlite3.OperationalError(kind)
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{kind}")
    assert salvage.is_damage(error) == damaged


def test_records_that_were_never_there_are_looked_for_once(monkeypatch):
    store = Store.create(None, info())
    store._db.execute("UPDATE records SET crc = crc + 1 WHERE key = ?", (ABOUT,))
    reads = []
    monkeypatch.setattr(
        "lipscope.study.store.read_table", lambda *at: reads.append(at) or salvage.read(*at)
    )
    assert [store.get(NORMS, str(key)) for key in range(20)] == [None] * 20
    assert len(reads) == 1 and store.lost


@pytest.fixture
def hurt(tmp_path):
    """A study in which one byte of a row is wrong, and its intact rows."""
    whole = make(tmp_path / "s")
    rows = Study.open(tmp_path / "s").rows
    at = whole.index(b"converged") + 3
    (tmp_path / "s" / FILE).write_bytes(damaged(whole, at, "bit"))
    return tmp_path / "s", rows


@pytest.mark.parametrize("verb", ["show", "export", "report"])
def test_a_command_ends_with_3_and_one_sentence(hurt, verb, capsys):
    assert main([verb, str(hurt[0])]) == 3
    said = capsys.readouterr()
    told = [line for line in said.err.splitlines() if "damaged" in line]
    assert len(told) == 1 and told[0].startswith(f"lipscope: {hurt[0]} is damaged: lost sigma of ")
    assert "Traceback" not in said.err


def test_python_warns_and_gives_the_rest(hurt):
    study = Study.open(hurt[0])
    with pytest.warns(DamageWarning, match="is damaged: lost sigma of"):
        rows = study.rows
    assert len(rows) == len(hurt[1]) - 1 and set(rows) < set(hurt[1])


def test_the_doctor_lists_what_is_lost_and_writes_a_copy_beside(hurt, capsys):
    before = (hurt[0] / FILE).read_bytes()
    assert main(["doctor", str(hurt[0])]) == 3
    assert "lost: sigma of " in capsys.readouterr().out
    assert main(["doctor", str(hurt[0]), "--repair"]) == 3
    assert (hurt[0] / FILE).read_bytes() == before
    copy = hurt[0].with_name("s.repaired")
    assert str(copy) in capsys.readouterr().out
    study = Study.open(copy)
    assert len(study.rows) == len(hurt[1]) - 1 and set(study.rows) < set(hurt[1])
    assert study.info.about.model == "fake/model" and study.commands == ["lipscope measure"]
    assert study.unfinished == "8 of 9 jobs are done"
    assert main(["doctor", str(copy)]) == 0
    # Never over what is there already.
    assert main(["doctor", str(hurt[0]), "--repair"]) == 2
    assert "holds a study" in capsys.readouterr().err


def test_the_doctor_repairs_only_a_study(tmp_path, capsys):
    assert main(["doctor", "--repair"]) == 2
    assert main(["doctor", str(tmp_path / "nothing"), "--repair"]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.wide
def test_no_damage_is_silent(capsys):
    """A few places of the campaign `python -m tests.study.damage`."""
    found = Counter(said for _, said in campaign(every=4099, ways=("bit", "cut")))
    assert found["told, rest true"] > 5 and not any(found[bad] for bad in BAD)


@pytest.mark.slow
def test_no_damage_is_silent_anywhere():
    found = Counter(said for _, said in campaign(every=64))
    assert found["told, rest true"] > 1000 and not any(found[bad] for bad in BAD)
