"""Study folders that a stranger laid out, and every command that meets one.

    python -m tests.campaigns.hostile_studies 200 --workers 2 --out folders.jsonl

Each folder has one or two traps: links of every kind, FIFOs, sockets and directories at every name
that lipscope writes, journals and write-ahead logs of every kind. Every command runs on a fresh
copy in a process of its own. Nothing may change but what the command was asked to write: no byte,
mode or name elsewhere, nothing at all in a folder that is only read; no traceback, no hang.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import socket
import sqlite3
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path

from lipscope._types import UserError
from lipscope.cli import main
from lipscope.study.directory import FILE, JOURNAL, LOCK
from lipscope.study.store import Store
from tests.campaigns.runner import Result, campaign, examine_each
from tests.study.damage import make
from tests.study.fakes import info, row

CHUNK = 5
SECONDS = 10.0
MAGIC = bytes.fromhex("d9d505f920a163d7")

Trap = Callable[[Path, Path], None]
"""A function of the foreign folder and the folder of victims."""


def at(name: str, kind: str) -> Trap:
    """Something of a kind in place of a name that lipscope writes."""

    def lay(foreign: Path, victims: Path) -> None:
        place = foreign / name
        place.parent.mkdir(exist_ok=True)
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(place)
        elif kind == "directory":
            place.mkdir()
            (place / "inside").write_text("inside")
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as one:
                here = os.getcwd()
                os.chdir(place.parent)  # the names of sockets are short
                one.bind(place.name)
                os.chdir(here)
        elif kind == "hard link":
            os.link(victims / "thesis.tex", place)
        elif kind == "hard link to nothing":
            os.link(victims / "empty", place)
        else:
            place.symlink_to(victims / kind.removeprefix("link to "))

    return lay


LINKS = ("link to thesis.tex", "link to missing", f"link to study/{FILE}")
PLACES: dict[str, tuple[str, ...]] = {
    FILE: ("fifo", "directory", "hard link", *LINKS),
    JOURNAL: ("fifo", "directory", "hard link", *LINKS),
    f"{FILE}-wal": ("fifo", "link to thesis.tex"),
    f"{FILE}-shm": ("link to thesis.tex",),
    LOCK: ("fifo", "socket", "hard link", "hard link to nothing", f"link to study/{LOCK}"),
    "report.html": ("fifo", "directory", "hard link", "link to thesis.tex", "link to missing"),
    "comparison.html": ("link to thesis.tex",),
    f".unfinished-{FILE}": ("directory", "link to thesis.tex"),
    f".unfinished-0123456789abcdef-{FILE}": ("socket", "link to folder"),
    ".unfinished-report.html": ("link to thesis.tex",),
    "../foreign.repaired": ("fifo", "link to folder", "link to missing"),
    f"../foreign.repaired/{FILE}": ("hard link", "link to thesis.tex"),
    f"../foreign.repaired/{JOURNAL}": ("link to thesis.tex",),
    f"../foreign.repaired/{LOCK}": ("hard link to nothing", "link to missing"),
}
"""What stands in place of each name that lipscope writes."""


def journal(content: Callable[[bytes, Path], bytes], edit: Trap | None = None) -> Trap:
    """A journal made from the file it lies beside; the file may be edited afterwards."""

    def lay(foreign: Path, victims: Path) -> None:
        whole = (foreign / FILE).read_bytes() if (foreign / FILE).is_file() else bytes(4096)
        if (foreign / JOURNAL).is_dir():
            shutil.rmtree(foreign / JOURNAL)
        (foreign / JOURNAL).unlink(missing_ok=True)
        (foreign / JOURNAL).write_bytes(content(whole, victims))
        if edit is not None:
            edit(foreign, victims)

    return lay


def header(whole: bytes, pages: int | None = None, records: int = 0, page: int = 4096) -> bytes:
    count = len(whole) // 4096 if pages is None else pages
    return (MAGIC + struct.pack(">IIIII", records, 0, count, 512, page)).ljust(512, b"\0")


def names_file(whole: bytes, name: str) -> bytes:
    """A journal that names a super-journal, which SQLite deletes after it has rolled back."""
    named = name.encode()
    tail = struct.pack(">I", 0x40000000 // 4096 + 1) + named
    return header(whole) + tail + struct.pack(">II", len(named), sum(named)) + MAGIC


def names_thesis(whole: bytes, victims: Path) -> bytes:
    return names_file(whole, str(victims / "thesis.tex"))


def restores(whole: bytes, number: int, content: bytes) -> bytes:
    """A journal that puts a page back."""
    page = content.ljust(4096, b"\0")
    check = sum(page[i] for i in range(4096 - 200, 0, -200)) & 0xFFFFFFFF
    return header(whole, records=1) + struct.pack(">I", number) + page + struct.pack(">I", check)


def without_file(foreign: Path, victims: Path) -> None:
    (foreign / FILE).unlink()


def emptied(foreign: Path, victims: Path) -> None:
    (foreign / FILE).write_bytes(b"")


def write_ahead(keep: tuple[str, ...]) -> Trap:
    """A study that another program switched to a write-ahead log, with some of its files."""

    def lay(foreign: Path, victims: Path) -> None:
        if not (foreign / FILE).is_file():
            return
        db = sqlite3.connect(foreign / FILE, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("UPDATE rows SET seconds = 1")
        kept = {
            name: (foreign / f"{FILE}-{name}").read_bytes()
            for name in keep
            if (foreign / f"{FILE}-{name}").is_file()
        }
        db.close()
        for name, content in kept.items():
            (foreign / f"{FILE}-{name}").write_bytes(content)

    return lay


def linked_study(foreign: Path, victims: Path) -> None:
    """The file is a link to a study of the reader that a killed run left with a journal."""
    whole = (victims / "study" / FILE).read_bytes()
    (victims / "study" / JOURNAL).write_bytes(names_file(whole, str(victims / "thesis.tex")))
    (foreign / FILE).unlink()
    (foreign / FILE).symlink_to(victims / "study" / FILE)


JOURNALS: dict[str, Trap] = {
    "super-journal": journal(lambda b, v: names_file(b, str(v / "thesis.tex"))),
    "super-journal that is a folder": journal(lambda b, v: names_file(b, str(v / "folder"))),
    "super-journal, file gone": journal(
        lambda b, v: names_file(b, str(v / "thesis.tex")), without_file
    ),
    "super-journal, file empty": journal(
        lambda b, v: names_file(b, str(v / "thesis.tex")), emptied
    ),
    "empty": journal(lambda b, v: b""),
    "garbage": journal(lambda b, v: bytes(range(256)) * 4),
    "header": journal(lambda b, v: header(b)),
    "header, cut": journal(lambda b, v: header(b)[:20]),
    "header, other pages": journal(lambda b, v: header(b, page=512)),
    "header, many pages": journal(lambda b, v: header(b, pages=2000)),
    "header, file gone": journal(lambda b, v: header(b), without_file),
    "header, file empty": journal(lambda b, v: header(b), emptied),
    "puts back the first page": journal(lambda b, v: restores(b, 1, b[:4096])),
    "puts back an empty page": journal(lambda b, v: restores(b, 2, b"")),
    "puts back no header": journal(lambda b, v: restores(b, 1, b"")),
    "puts back, file gone": journal(lambda b, v: restores(b, 1, b[:4096]), without_file),
    "the file is a link to a study with a journal": linked_study,
    "write-ahead header": write_ahead(()),
    "write-ahead log": write_ahead(("wal",)),
    "write-ahead log and index": write_ahead(("wal", "shm")),
    "write-ahead index": write_ahead(("shm",)),
}
TRAPS: dict[str, Trap] = {
    **{f"journal: {name}": trap for name, trap in JOURNALS.items()},
    **{f"{kind} at {name}": at(name, kind) for name, kinds in PLACES.items() for kind in kinds},
}


def resume(foreign: Path) -> int:
    """What every command that writes to a study does, without its model."""
    try:
        store = Store.create(foreign, info())
        store.write([row(layer=2, n=64)])
        store.close()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _words(*words: str) -> Callable[[Path], int]:
    """A command line; FOREIGN and the like stand for paths in the scratch folder."""
    places = {
        "FOREIGN": "foreign",
        "PART": "part",
        "NEW": "new",
        "PAGE": "page.html",
        "CSV": "a.csv",
    }

    def command(top: Path) -> int:
        return main([str(top / places[word]) if word in places else word for word in words])

    return command


WRITTEN = (FILE, LOCK, JOURNAL)
COMMANDS: dict[str, tuple[Callable[[Path], int], tuple[str, ...]]] = {
    "show": (_words("show", "FOREIGN"), ()),
    "show --json": (_words("show", "FOREIGN", "--json"), ()),
    "export": (_words("export", "FOREIGN"), ()),
    "export file": (_words("export", "FOREIGN", "CSV"), ("a.csv",)),
    "export --tokens": (_words("export", "FOREIGN", "--tokens"), ()),
    "report": (_words("report", "FOREIGN"), ("foreign/report.html",)),
    "report, two": (_words("report", "FOREIGN", "PART"), ("foreign/comparison.html",)),
    "report --out": (_words("report", "FOREIGN", "--out", "PAGE"), ("page.html",)),
    "compare": (_words("compare", "FOREIGN", "PART", "--out", "PAGE"), ("page.html",)),
    "doctor": (_words("doctor", "FOREIGN"), ()),
    "doctor --repair": (
        _words("doctor", "FOREIGN", "--repair"),
        ("foreign.repaired", *(f"foreign.repaired/{name}" for name in WRITTEN)),
    ),
    "merge from": (_words("merge", "NEW", "FOREIGN"), ("new", f"new/{FILE}", f"new/{LOCK}")),
    "merge into": (
        _words("merge", "FOREIGN", "PART"),
        tuple(f"foreign/{name}" for name in WRITTEN),
    ),
    "resume": (lambda top: resume(top / "foreign"), tuple(f"foreign/{name}" for name in WRITTEN)),
}
"""Each command, and the names that it was asked to write."""


@cache
def template() -> Path:
    """A folder with a study, a part of it, and files of the reader."""
    top = Path(tempfile.mkdtemp())
    make(top / "foreign")
    shutil.copytree(top / "foreign", top / "part")
    victims = top / "victims"
    shutil.copytree(top / "foreign", victims / "study")
    (victims / "thesis.tex").write_text("\\documentclass{article}\n" * 40)
    (victims / "thesis.tex").chmod(0o600)
    (victims / "empty").touch(0o600)
    (victims / "folder").mkdir()
    (victims / "folder" / "inside").write_text("inside")
    # Once here, on copies, so that children find everything imported. Were every folder refused,
    # the campaign would find nothing wrong with any.
    for name, (run, _) in COMMANDS.items():
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copytree(top, Path(scratch) / "top")
            copy, said = Path(scratch) / "top", io.StringIO()
            assert _silent(lambda run=run, copy=copy: run(copy), said) == 0, (name, said.getvalue())
    return top


Seen = dict[str, tuple[str, object]]


def seen(top: Path) -> Seen:
    """Every name below a folder: what it is, its mode, and its content, target or links."""
    found: Seen = {}
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = Path(folder) / name
            status = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                content = path.read_bytes()
            found[str(path.relative_to(top))] = (stat.filemode(status.st_mode), content)
    return found


def changed(
    before: dict[str, tuple[str, object]], after: dict[str, tuple[str, object]]
) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def faults(top: Path, command: str) -> tuple[str, list[str]]:
    """Run a command in a child; how it ended, and what is wrong with that."""
    run, may_write = COMMANDS[command]
    before, said = seen(top), top.with_name(f"{top.name}.said")
    child = os.fork()
    if child == 0:
        with open(said, "w") as file:
            os._exit(_silent(lambda: run(top), file))
    # A command that hangs uses no processor time, and one on a busy machine gets little.
    until, code, seconds = time.monotonic() + 10 * SECONDS, None, 0.0
    while time.monotonic() < until and code is None:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            seconds = used.ru_utime + used.ru_stime
        time.sleep(0.002)
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hang", [f"{command}: no answer in {10 * SECONDS:.0f} s"]
    message = said.read_text() if said.exists() else ""
    wrong = []
    if seconds > SECONDS:
        wrong.append(f"{command}: {seconds:.0f} s of processor time")
    if code not in (0, 2, 3) or "Traceback" in message:
        wrong.append(f"{command}: exit code {code}: {message[-300:]}")
    after = seen(top)
    for name in sorted(changed(before, after)):
        was, now = before.get(name), after.get(name)
        leftover = Path(name).name.startswith(".unfinished-") and now is None
        # A regular file may be replaced by one, or come into being; a link may not.
        plain = all(x is None or x[0][0] in ("-", "d") for x in (was, now))
        removed = name.endswith(JOURNAL) or leftover
        if not (name in may_write and plain) and not (removed and command in ROLL_BACK):
            wrong.append(f"{command}: {name} was {was and was[0]} and is {now and now[0]}")
    return f"exit code {code}", wrong


ROLL_BACK = ("merge into", "resume", "doctor --repair")
"""Commands that hold the lock of a folder, and may remove what a killed run left there."""


def _silent(work: Callable[[], int], file: io.TextIOBase) -> int:
    with redirect_stdout(io.StringIO()), redirect_stderr(file):
        try:
            code = work()
        except BaseException as error:
            file.write(f"Traceback: {error!r}")
            code = 70
    file.flush()
    return code


def folder(number: int, top: Path) -> tuple[str, ...]:
    """Lay out the folder of this number; the names of its traps."""
    shutil.copytree(template(), top)
    names = list(TRAPS)
    # Every trap alone, then pairs of them.
    traps = (
        (names[number],) if number < len(names) else tuple(random.Random(number).sample(names, 2))
    )
    for name in traps:
        with suppress(OSError, sqlite3.Error):  # the other trap is in the way
            TRAPS[name](top / "foreign", top / "victims")
    return traps


def examine(number: int, result: Result, commands: tuple[str, ...] = tuple(COMMANDS)) -> None:
    """Run commands on fresh copies of one folder."""
    for command in commands:
        with tempfile.TemporaryDirectory() as scratch:
            traps = folder(number, Path(scratch) / "top")
            ended, wrong = faults(Path(scratch) / "top", command)
        result.count(command, ended)
        result.faults += [f"{' and '.join(traps)}: {sentence}" for sentence in wrong]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tempfile.tempdir = scratch  # for the workers as well, which are forks of this process
        code = campaign(partial(examine_each, examine, CHUNK), CHUNK, 200, __doc__ or "")
    sys.exit(code)
