"""Studies with right checksums and absurd content, and every command that reads a study.

    python -m tests.campaigns.edited_studies 1000 --workers 2 --out edited.jsonl

A checksum is no secret: each study is a good one whose rows, records, schema or pages were changed,
with the checksums that belong to the change. Every command must answer with exit code 0, 2 or 3,
within 10 s, without a traceback, and nothing from the study may reach a page as HTML, a terminal as
control characters, or a spreadsheet as a formula.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

from lipscope.cli import main
from lipscope.study.directory import FILE
from lipscope.study.salvage import CLAIM, record_checksum, row_checksum
from lipscope.study.store import Store
from tests.campaigns.runner import Result, campaign, examine_each
from tests.study.damage import make
from tests.study.fakes import info, row, sensitivity

CHUNK = 10
SECONDS = 10

MARKUP = ("<script>alert(77)</script>", '"><img src=x onerror=alert(77)>', "</script><b>77")
TEXTS = (
    *MARKUP,
    "\x1b]0;title\x07\x1b[2J",
    "\u202egnp.exe",
    "=cmd|' /C calc'!A0",
    "@SUM(1)",
    "\t=1+1",
    "-1+1",
    "\r\n=1",
    "",
    "x" * 100_000,
    "a\0b",
    "\x9b31m",
    "failed",
    "overflow",
    "converged",
    "sigma",
    "heads",
    "model",
    "bound: x",
    "worst found",
    "budget",
    "inf",
)
NUMBERS = (
    0, 1, -1, 2, 10**6, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 0.0, -0.0, 0.5, 1.0, -1.0, 1e-300,
    5e-324, 1e300, 1e308, 1.7e308, -1e308, float("inf"), float("-inf"), None,
)  # fmt: skip
JSON: tuple[Any, ...] = (
    *NUMBERS, *TEXTS, True, False, float("nan"), 10**400, [], {}, [[]], [None], {"a": {}}, [1, "a"],
    [0] * 1000, ["x"], [[0, 0]],
)  # fmt: skip
COLUMNS = (
    "probe", "scope", "layer", "head", "n", "sample", "kind", "norm", "value", "lower", "upper",
    "residual", "status", "radius", "dtype", "device", "seconds", "reason", "extra",
)  # fmt: skip

COMMANDS: dict[str, tuple[str, ...]] = {
    "show": ("show", "DIR"),
    "show --json": ("show", "DIR", "--json"),
    "export": ("export", "DIR", "OUT/rows.csv"),
    "export --tokens": ("export", "DIR", "OUT/tokens.csv", "--tokens"),
    "export --parquet": ("export", "DIR", "OUT/rows.parquet", "--parquet"),
    "report": ("report", "DIR", "--out", "OUT/page.html"),
    "report, two": ("report", "DIR", "GOOD", "--out", "OUT/two.html"),
    "report, as reference": ("report", "GOOD", "DIR", "--out", "OUT/reference.html"),
    "compare": ("compare", "DIR", "GOOD", "--out", "OUT/compared.html"),
    "doctor": ("doctor", "DIR"),
    "doctor --repair": ("doctor", "DIR", "--repair"),
    "merge": ("merge", "OUT/merged", "DIR"),
    "merge, with a good one": ("merge", "OUT/both", "GOOD", "DIR"),
}


def good(directory: Path) -> None:
    """A study with every kind of row and record."""
    make(directory)
    store = Store.create(directory, info())
    rows = [
        row("model", None, None, 8, 0, value=3.0),
        row(layer=1, n=64, value=float("nan"), lower=0.0, upper=float("inf"), status="failed"),
        *(
            row("heads", 0, 0, n, 0, value=9.0 * n, probe="bound: ball", kind="upper")
            for n in (8, 16)
        ),
        *(row("heads", 0, 0, n, 0, value=1.0 * n, probe="worst found") for n in (8, 16)),
        row("attention", 0, None, 8, 0, probe="attack: ascent, x", status="evaluated"),
    ]
    rows += [
        row(
            "bf16", layer, None, 8, b, probe=probe, kind=kind, norm="output", value=0.01,
            lower=0.009, upper=0.02, status="predicted",
        )
        for b in (0, 1)
        for probe, kind, layer in (
            ("budget", "weight: layers.0", 0),
            ("budget", "total", None),
            ("observed error", "total", None),
        )
    ]  # fmt: skip
    store.write(rows, [sensitivity(rows[0])])
    for b in (0, 1):
        part = {
            "sites": [["layers.0", 0, "weight", None], ["layers.1", 1, "key", 0]],
            "q": [[0.01, 0.02], [0.03, -0.01]],
            "summed": False,
            "curved": [1e-8, 1e-4],
            "observed": 1e-4,
            "size": 2.0,
            "n": 8,
        }
        key = json.dumps(["output", 2, False, True, 0, b, 8, "bf16"])
        store.put("budget", key, json.dumps(part))
    store.put("worst case", json.dumps(["output", "bf16"]), "0.5")
    claim = {
        "id": "a", "numbers": {}, "quick": True, "seed": 0, "device": "cpu", "seconds": 1.0,
        "used": {}, "code": "", "version": "0",
    }  # fmt: skip
    store.put("note", "a kind that no version knows", json.dumps(claim))
    assert CLAIM != "note"
    store.close()


def edit_rows(db: sqlite3.Connection, draw: random.Random) -> str:
    rows = db.execute("SELECT rowid, * FROM rows").fetchall()
    chosen = draw.sample(rows, draw.choice((1, 5, len(rows))))
    names = draw.sample(COLUMNS, draw.choice((1, 1, 2)))
    values = [draw.choice((*NUMBERS, *TEXTS)) for _ in names]
    if draw.random() < 0.3:  # all bounds with the value, so that they do not contradict it
        names, values = ["value", "lower", "upper"], [draw.choice(NUMBERS)] * 3
    for rowid, *record in chosen:
        new = list(record[:-1])
        for name, value in zip(names, values, strict=True):
            new[COLUMNS.index(name)] = value
        store_row(db, new, rowid)
    told = [f"{name} = {str(x)[:20]!r}" for name, x in zip(names, values, strict=True)]
    return f"{len(chosen)} rows: {', '.join(told)}"


def store_row(db: sqlite3.Connection, record: list[Any], rowid: int | None = None) -> None:
    """Store a row with the checksum of what SQLite makes of its values."""
    if rowid is not None:
        db.execute("DELETE FROM rows WHERE rowid = ?", (rowid,))
    try:
        marks = ", ".join("?" * (len(COLUMNS) + 1))
        at = db.execute(f"INSERT OR REPLACE INTO rows VALUES ({marks})", (*record, 0)).lastrowid
    except sqlite3.IntegrityError:  # NULL where there may be none
        return
    (kept,) = db.execute("SELECT * FROM rows WHERE rowid = ?", (at,)).fetchall()
    db.execute("UPDATE rows SET crc = ? WHERE rowid = ?", (row_checksum(kept[:-1]), at))


def many_rows(db: sqlite3.Connection, draw: random.Random) -> str:
    """Rows in many places, so that a table over all of them has a place for each combination."""
    base = list(db.execute("SELECT * FROM rows").fetchone()[:-1])
    count, what = draw.choice((30, 300, 1000)), draw.sample(COLUMNS[:8], draw.choice((1, 2, 3)))
    for i in range(count):
        new = list(base)
        for name in what:
            at = COLUMNS.index(name)
            new[at] = i + 1 if isinstance(base[at], int) else f"{base[at]}{i}"
        store_row(db, new)
    return f"{count} rows that differ in {', '.join(what)}"


def edit_records(db: sqlite3.Connection, draw: random.Random) -> str:
    records = db.execute("SELECT rowid, kind, key, value FROM records").fetchall()
    kinds = sorted({(kind, key if kind == "info" else "") for _, kind, key, _ in records})
    kind, fact = draw.choice(kinds)
    some = [r for r in records if r[1] == kind and (not fact or r[2] == fact)]
    rowid, kind, key, value = draw.choice(some)
    how = draw.choice(("value", "value", "value", "key", "cut", "delete", "type"))
    if how == "delete":
        db.execute("DELETE FROM records WHERE rowid = ?", (rowid,))
    elif how == "type":
        value = draw.choice((0, 1.5, b"", b"\xff" * 16, "", "null", "[" * 5000, "{}"))
    elif how == "cut":
        value = value[: draw.randrange(len(value))]
    elif how == "key":
        key = draw.choice(
            (*TEXTS, json.dumps(mutated(json.loads(key), draw)) if key[:1] == "[" else "x")
        )
    elif isinstance(value, bytes):
        value = draw.choice((b"\xff" * len(value), b"\x7f\x80\0\0" * (len(value) // 4), value * 2))
    else:
        value = json.dumps(mutated(json.loads(value), draw))
    if how != "delete":
        db.execute(
            "UPDATE OR REPLACE records SET key = ?, value = ?, crc = ? WHERE rowid = ?",
            (key, value, record_checksum((kind, key, value)), rowid),
        )
    return f"{kind} {fact}: {how}"


def mutated(data: Any, draw: random.Random) -> Any:
    """The data with something in it replaced, removed or repeated."""
    if isinstance(data, dict) and data and draw.random() < 0.9:
        name = draw.choice(sorted(data))
        if draw.random() < 0.1:
            return {key: value for key, value in data.items() if key != name}
        if draw.random() < 0.1:
            return {**data, draw.choice(TEXTS): data[name]}
        return {**data, name: mutated(data[name], draw)}
    if isinstance(data, list) and data and draw.random() < 0.85:
        at, way = draw.randrange(len(data)), draw.random()
        if way < 0.1:
            return data[:at] + data[at + 1 :]
        if way < 0.25:
            return data * draw.choice((2, 100))
        return [*data[:at], mutated(data[at], draw), *data[at + 1 :]]
    return draw.choice(JSON)


def many_jobs(db: sqlite3.Connection, draw: random.Random) -> str:
    """Commands that ask for more than anyone can measure."""
    layers, groups = draw.choice(((3000, 4000), (10, 90_000), (90_000, 10), (999, 999), (1, 1)))
    heads = draw.choice((1, 30, 1000)) if layers < 100 else 1
    asked = {
        "groups": [[8, [i]] for i in range(groups)],
        "layers": list(range(layers)),
        "heads": [[i, list(range(heads))] for i in range(layers)],
        "scopes": ["heads", "attention", "model"],
    }
    count = draw.choice((1, 1, 3, 900, 2000))
    if count > 3:
        asked = {**asked, "groups": [[8, [0]]], "layers": [0], "heads": [[0, [0]]]}
    listed = [
        {"verb": "measure", "line": f"lipscope measure {i}", "asked": asked, "probe": f"sigma{i}"}
        for i in range(count)
    ]
    value = json.dumps(listed)
    db.execute(
        "UPDATE records SET value = ?, crc = ? WHERE key = 'commands'",
        (value, record_checksum(("info", "commands", value))),
    )
    return f"{count} commands, {layers} layers x {groups} groups x {heads} heads"


SCHEMAS = (
    "DROP TABLE rows; CREATE VIEW rows AS WITH RECURSIVE c(x) AS "
    "(SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c",
    "DROP TABLE records; CREATE VIEW records AS SELECT * FROM rows",
    "DROP INDEX rows_key",
    "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END",
    "CREATE TABLE more AS SELECT * FROM rows",
    "ALTER TABLE rows RENAME COLUMN value TO worth",
    "ALTER TABLE records ADD COLUMN more TEXT",
    "UPDATE sqlite_master SET rootpage = 2 WHERE name = 'records'",
    "UPDATE sqlite_master SET rootpage = 5 WHERE name = 'rows'",
    "UPDATE sqlite_master SET rootpage = 999999 WHERE name = 'rows_key'",
    "UPDATE sqlite_master SET sql = 'CREATE VIRTUAL TABLE rows USING fts5(a)' WHERE name = 'rows'",
    "PRAGMA application_id = 0",
    "PRAGMA user_version = 1",
    "PRAGMA user_version = 99",
    "DROP TABLE rows; DROP TABLE records; PRAGMA encoding = 'UTF-16'; VACUUM",
    "PRAGMA page_size = 512; VACUUM",
    "PRAGMA page_size = 65536; VACUUM",
    "PRAGMA auto_vacuum = 1; VACUUM",
)


def edit_schema(db: sqlite3.Connection, draw: random.Random) -> str:
    chosen = draw.choice(SCHEMAS)
    db.execute("PRAGMA writable_schema = 1")
    db.executescript(chosen)
    return chosen[:40]


EDITS: dict[str, tuple[int, Callable[[sqlite3.Connection, random.Random], str]]] = {
    "rows": (8, edit_rows),
    "many rows": (2, many_rows),
    "records": (10, edit_records),
    "many jobs": (1, many_jobs),
    "schema": (2, edit_schema),
}


def edited(number: int, directory: Path) -> str:
    """Put the study of this number in a directory; the edit in words."""
    draw = random.Random(number)
    directory.mkdir()
    (directory / FILE).write_bytes(original())
    db = sqlite3.connect(directory / FILE, isolation_level=None)
    db.execute("PRAGMA ignore_check_constraints = 1")
    db.execute("PRAGMA synchronous = OFF")
    done = []
    weights = [weight for weight, _ in EDITS.values()]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        (kind,) = draw.choices(list(EDITS), weights)
        # An earlier edit may have made a view without an end of a table.
        budget = itertools.count()
        db.set_progress_handler(lambda budget=budget: next(budget) > 1000, 10_000)
        try:
            if kind != "schema":
                db.execute("BEGIN")
            done.append(f"{kind}: {EDITS[kind][1](db, draw)}")
            if kind != "schema":
                db.execute("COMMIT")
        except (sqlite3.Error, IndexError, ValueError, TypeError):  # an earlier edit is in the way
            if db.in_transaction:
                db.execute("ROLLBACK")
    db.close()
    return "; ".join(done)


@cache
def original() -> bytes:
    """The good study; every command has met it, so that children find everything imported."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "out").mkdir()
        for name in ("good", "study"):
            good(top / name)
        for words in COMMANDS.values():
            # Were every study refused, the campaign would find nothing wrong with any.
            assert run(words, top)[0] == "exit code 0", words
        return (top / "good" / FILE).read_bytes()


def run(words: tuple[str, ...], top: Path) -> tuple[str, list[str]]:
    """Run a command in this process; return how it ended and the faults in its answer."""
    places = {"DIR": str(top / "study"), "GOOD": str(top / "good")}
    line = [places.get(word, word.replace("OUT", str(top / "out"))) for word in words]
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(line)
        except BaseException as error:
            import traceback

            return "traceback", [f"{error!r} {traceback.format_exc()[-700:]}"]
    wrong = []
    if code not in (0, 2, 3) or "Traceback" in err.getvalue():
        wrong.append(f"exit code {code}: {err.getvalue()[-300:]}")
    if code == 2 and len(err.getvalue().strip().splitlines()) > 3:
        wrong.append(f"more than a sentence: {err.getvalue()[:300]}")
    if time.process_time() - began > SECONDS:
        wrong.append(f"{time.process_time() - began:.0f} s of processor time")
    control = {c for c in out.getvalue() + err.getvalue() if not c.isprintable() and c != "\n"}
    if control:
        wrong.append(f"control characters on the terminal: {control}")
    if "--json" in words and code in (0, 3):
        json.loads(out.getvalue())
    return f"exit code {code}", wrong + injected(top / "out")


def injected(out: Path) -> list[str]:
    """What came through to the files that the command wrote, which are then removed."""
    wrong = []
    for path in out.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        wrong += [f"HTML in {path.name}: {one}" for one in MARKUP if one in text]
        path.unlink()
    for path in out.glob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            cells = {cell for line in csv.reader(file) for cell in line}
        wrong += [f"formula in {path.name}: {cell[:40]!r}" for cell in cells if is_formula(cell)]
        path.unlink()
    return wrong


def is_formula(cell: str) -> bool:
    if not cell or cell[0] not in "=+-@\t\r\n":
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


def examine(number: int, result: Result, commands: dict[str, tuple[str, ...]] = COMMANDS) -> None:
    """All commands on one study, in a child that is killed if it does not answer."""
    csv.field_size_limit(2**31 - 1)
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch)
        for name in ("out", "good"):
            (top / name).mkdir()
        (top / "good" / FILE).write_bytes(original())
        what = edited(number, top / "study")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                with os.fdopen(writer, "w") as pipe:
                    for name, words in commands.items():
                        print(json.dumps(["begin", name]), file=pipe, flush=True)
                        signal.alarm(10 * SECONDS)  # ends this child, also inside of SQLite
                        print(json.dumps(["end", run(words, top)]), file=pipe, flush=True)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = [json.loads(line) for line in pipe]
        os.waitpid(child, 0)
    if len(lines) < 2 * len(commands):
        result.faults.append(f"study {number}, {lines[-1][1]}: no answer ({what})")
    for (_, name), (_, (ended, wrong)) in zip(lines[::2], lines[1::2], strict=False):
        result.count(name, ended)
        result.faults += [f"study {number}, {name}: {one} ({what})" for one in wrong]


if __name__ == "__main__":
    sys.exit(campaign(partial(examine_each, examine, CHUNK), CHUNK, 1000, __doc__ or ""))
