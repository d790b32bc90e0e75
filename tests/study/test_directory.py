"""Reading a study changes nothing, and writing one touches nothing that nobody named."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study import directory as rules
from lipscope.study.directory import FILE, JOURNAL, LOCK
from lipscope.study.store import Store
from lipscope.study.study import Study
from lipscope.study.study import merge_directories as merge
from tests.campaigns.hostile_studies import JOURNALS, names_file, seen, write_ahead
from tests.study.damage import make
from tests.study.fakes import info

ROWS = 54


@pytest.fixture
def foreign(tmp_path):
    make(tmp_path / "foreign")
    (tmp_path / "foreign" / LOCK).unlink(missing_ok=True)
    return tmp_path / "foreign"


@pytest.fixture
def victim(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "thesis.tex").chmod(0o600)
    return tmp_path / "thesis.tex"


READERS = (
    ["show", "DIR"],
    ["export", "DIR"],
    ["report", "DIR", "--out", "OUT/page.html"],
    ["compare", "DIR", "--out", "OUT/page.html"],
    ["doctor", "DIR"],
    ["merge", "OUT/new", "DIR"],
)


@pytest.mark.parametrize("words", READERS, ids=lambda words: words[0])
def test_a_journal_that_names_a_file_does_not_cost_that_file(
    foreign, victim, tmp_path, words, capsys
):
    whole = (foreign / FILE).read_bytes()
    (foreign / JOURNAL).write_bytes(names_file(whole, str(victim)))
    before = seen(foreign)
    (tmp_path / "out").mkdir()
    places = {"DIR": str(foreign), "OUT": str(tmp_path / "out")}
    code = main([places.get(w, w.replace("OUT", places["OUT"])) for w in words])
    assert code == 2 and "reading changes nothing" in capsys.readouterr().err
    assert seen(foreign) == before and victim.read_text() == "mine"


def test_a_writer_never_rolls_back_a_journal_that_names_a_file(foreign, victim):
    whole = (foreign / FILE).read_bytes()
    (foreign / JOURNAL).write_bytes(names_file(whole, str(victim)))
    before = seen(foreign)
    with pytest.raises(UserError, match="names another file"):
        Store.create(foreign, info())
    after = seen(foreign)
    after.pop(LOCK, None)
    assert after == before and victim.read_text() == "mine"


@pytest.mark.parametrize("name", [name for name in JOURNALS if "write-ahead" in name])
def test_reading_creates_no_write_ahead_log(foreign, tmp_path, name):
    JOURNALS[name](foreign, tmp_path)
    before = seen(foreign)
    with pytest.raises(UserError, match="another program has"):
        Study.open(foreign)
    assert seen(foreign) == before


def test_a_stray_log_is_refused_by_readers_and_writers(foreign, tmp_path):
    (foreign / f"{FILE}-wal").write_bytes(b"x" * 100)
    for opening in (Store.open, lambda place: Store.create(place, info())):
        with pytest.raises(UserError, match=f"there is {FILE}-wal in it"):
            opening(foreign)
    assert not (foreign / f"{FILE}-shm").exists()


def test_a_journal_without_a_study_is_removed_before_one_is_put_there(foreign, tmp_path):
    """A killed run leaves a journal; its owner removes the study and keeps the folder."""
    new = tmp_path / "new"
    for write in (
        lambda: merge(new, [foreign]),
        lambda: Study.open(foreign).save(new),
        lambda: Store.create(new, info()).close(),
    ):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        JOURNALS["puts back no header"](foreign, tmp_path)
        shutil.move(foreign / JOURNAL, new / JOURNAL)
        write()
        assert not (new / JOURNAL).exists()
        with closing(Study.open(new)) as study:
            assert len(study.rows) in (0, ROWS) and not study.damage


def test_merge_rolls_back_what_a_killed_run_left_in_its_folder(foreign, tmp_path):
    shutil.copytree(foreign, tmp_path / "part")
    code = (
        "import os, sys; from pathlib import Path; from tests.study.fakes import info, row\n"
        "from lipscope.study.store import Store\n"
        "store = Store.create(Path(sys.argv[1]), info())\n"
        "store._db.execute('PRAGMA cache_spill = 1'); store._db.execute('PRAGMA cache_size = 1')\n"
        "store._db.execute('BEGIN IMMEDIATE')\n"
        "for i in range(2000): store._put([('kind', str(i), 'x' * 500)])\n"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(foreign)], check=False)
    assert (foreign / JOURNAL).exists()
    assert merge(foreign, [tmp_path / "part"]).content == f"{ROWS} rows"
    assert not (foreign / JOURNAL).exists()


@pytest.mark.parametrize("name", [FILE, JOURNAL])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_a_writer_refuses_what_is_no_file_of_its_own(foreign, tmp_path, name, kind):
    make(tmp_path / "mine")
    target = tmp_path / "mine" / FILE
    (foreign / name).unlink(missing_ok=True)
    if kind == "link":
        (foreign / name).symlink_to(target)
    elif kind == "hard link":
        os.link(target, foreign / name)
    else:
        os.mkfifo(foreign / name)
    before = target.read_bytes()
    for write in (
        lambda: Store.create(foreign, info()),
        lambda: merge(foreign, [tmp_path / "mine"]),
    ):
        with pytest.raises(UserError, match="cannot write"):
            write()
    assert target.read_bytes() == before and stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_repair_does_not_follow_a_link(foreign, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    foreign.with_name("foreign.repaired").symlink_to(tmp_path / "elsewhere")
    assert main(["doctor", str(foreign), "--repair"]) == 2
    assert "is a link" in capsys.readouterr().err and not list((tmp_path / "elsewhere").iterdir())


def test_drafts_of_killed_merges_are_removed_under_the_lock(foreign, tmp_path, victim):
    new = tmp_path / "new"
    new.mkdir()
    (new / f".unfinished-1-{FILE}").write_text("half")
    (new / f".unfinished-{FILE}").symlink_to(victim)
    merge(new, [foreign])
    assert {path.name for path in new.iterdir()} - {LOCK} == {FILE}
    assert victim.read_text() == "mine"


def test_a_study_behind_a_link_is_read(foreign, tmp_path):
    """As in the cache of a hub, whose snapshots are links."""
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / FILE).symlink_to(foreign / FILE)
    with closing(Study.open(tmp_path / "snapshot")) as study:
        assert len(study.rows) == ROWS


def altered(place, *statements):
    db = sqlite3.connect(place / FILE, isolation_level=None)
    db.execute("PRAGMA writable_schema = 1")
    for statement in statements:
        db.execute(statement)
    db.close()


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"


@pytest.mark.parametrize(
    ("statements", "rows"),
    [
        (("DROP TABLE rows", f"CREATE VIEW rows AS {ENDLESS}"), 0),
        ((f"CREATE VIEW more AS {ENDLESS}",), ROWS),
        (("CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END",), ROWS),
        (("CREATE TABLE other (a)",), ROWS),
        (("ANALYZE",), ROWS),
        (("UPDATE sqlite_master SET sql = 'CREATE TABLE rows (a)' WHERE name = 'rows'",), ROWS),
        (("DELETE FROM sqlite_master WHERE name = 'rows_key'",), ROWS),
    ],
)
def test_a_schema_that_is_not_ours_is_damage_and_is_not_used(foreign, statements, rows, capsys):
    altered(foreign, *statements)
    before = seen(foreign)
    assert main(["show", str(foreign)]) == 3
    assert "is damaged: lost the schema" in capsys.readouterr().err
    assert seen(foreign) == before
    assert len(Store.open(foreign).rows()) == rows
    with pytest.raises(UserError, match="is damaged"):
        Store.create(foreign, info())


def test_the_connections_of_readers_and_writers_distrust_the_file(foreign):
    def says(db, *names):
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in names]

    with closing(Store.open(foreign)) as store:
        names = ("trusted_schema", "cell_size_check", "writable_schema", "query_only")
        assert says(store._db, *names) == [0, 1, 0, 1]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store._db.execute("PRAGMA query_only = 0").execute("DELETE FROM rows")
    with closing(Store.create(foreign, info())) as store:
        names = ("trusted_schema", "cell_size_check", "writable_schema")
        assert says(store._db, *names) == [0, 1, 0]
        with pytest.raises(sqlite3.OperationalError, match="too many attached"):
            store._db.execute("ATTACH ':memory:' AS other")


def test_a_huge_file_is_refused_before_it_is_read(foreign):
    os.truncate(foreign / FILE, rules.MOST_BYTES + 1)  # it has a hole
    with pytest.raises(UserError, match=r"is too large: .* at most 4 are read$"):
        Study.open(foreign)


def test_a_large_file_with_another_schema_is_not_copied(foreign):
    with closing(sqlite3.connect(foreign / FILE)) as db:
        db.execute("CREATE TABLE more (x)")
    os.truncate(foreign / FILE, rules.MOST_COPIED + 1)
    with pytest.raises(UserError, match="at most 1 are read in a study with another schema"):
        Study.open(foreign)


def test_pages_that_share_their_children_end(foreign):
    """Ten levels of pages, each with 300 times the next one as its child: 300^10 rows."""
    whole, page = bytearray((foreign / FILE).read_bytes()), 4096
    leaf = int.from_bytes(whole[page + 8 : page + 12], "big")
    assert whole[page] == 5 and whole[(leaf - 1) * page] == 13
    first = len(whole) // page + 1
    for level in range(10):
        child = (first + level + 1 if level < 9 else leaf).to_bytes(4, "big")
        cells = [page - 5 * (i + 1) for i in range(300)]
        head = b"\x05\0\0" + (300).to_bytes(2, "big") + min(cells).to_bytes(2, "big") + b"\0"
        body = head + child + b"".join(at.to_bytes(2, "big") for at in cells)
        # Each cell is a child and a key of one byte; keys need not grow for a scan to go on.
        whole += body.ljust(min(cells), b"\0") + (child + b"\x7f") * 300
    whole[page : 2 * page] = whole[(first - 1) * page : first * page]
    # With a hole at its end the file could hold a million rows.
    size = len(whole) + 2**26
    whole[28:32] = (size // page).to_bytes(4, "big")
    (foreign / FILE).write_bytes(whole)
    os.truncate(foreign / FILE, size)
    done: list[int] = []
    worker = threading.Thread(target=lambda: done.append(main(["show", str(foreign)])), daemon=True)
    worker.start()
    worker.join(10)
    assert done == [3]


def test_a_reader_waits_for_a_living_writer(foreign, monkeypatch):
    writer = sqlite3.connect(foreign / FILE, isolation_level=None, check_same_thread=False)
    writer.execute("BEGIN EXCLUSIVE")
    writer.execute("DELETE FROM records WHERE kind = 'no such kind'")
    threading.Timer(0.3, lambda: writer.execute("COMMIT")).start()
    with closing(Study.open(foreign)) as study:
        assert len(study.rows) == ROWS
    monkeypatch.setattr(rules, "PATIENCE", 0.05)
    writer.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="another process is using it"):
        Study.open(foreign)
    writer.close()


def test_a_write_ahead_study_stays_one(foreign, tmp_path):
    """`--out` is no reason to convert the file of another program."""
    write_ahead(())(foreign, tmp_path)
    with pytest.raises(UserError, match="write-ahead"):
        Store.create(foreign, info())
