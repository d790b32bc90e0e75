"""Power loss: the system calls of a run are recorded and replayed up to every point.

    python -m tests.campaigns.power_loss 1000 --workers 2 --out losses.jsonl

strace records what a process does that writes a study, job by job, and merges it. A point is a
moment of this record. What was synced before it is on disk. Of everything else a random choice is:
writes are dropped, reordered or torn at multiples of 512 bytes, and creating, removing and renaming
files is undone from some operation on. Then the study is opened as the next run does: all that was
acknowledged before the point must be there, and nothing else but what was being written.
"""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lipscope._types import UserError
from lipscope.study.store import Store
from tests.campaigns.runner import Result, campaign
from tests.study.fakes import many_rows, roll_back

CHUNK = 50
JOBS = 8
ROOT = Path(__file__).resolve().parents[2]
CALLS = (
    "openat,mkdir,mkdirat,pwrite64,write,ftruncate,fsync,fdatasync,unlink,unlinkat,rename,renameat,"
    "renameat2"
)


@dataclass(frozen=True)
class Step:
    """One operation of the recorded process; `data` of a note is what was acknowledged."""

    what: str
    path: str = ""
    data: bytes = b""
    offset: int = 0
    other: str = ""


@cache
def recorded(synchronous: str = "") -> tuple[Step, ...]:
    """The steps of the process, in order."""
    with tempfile.TemporaryDirectory() as folder:
        top, log = Path(folder).resolve() / "top", Path(folder) / "log"
        top.mkdir()
        code = (
            "from tests.study.fakes import keep_and_merge; "
            f"keep_and_merge({str(top)!r}, {JOBS}, {synchronous!r})"
        )
        command = ["strace", "-f", "-y", "-xx", "-s", "10000000", "-e", f"trace={CALLS}"]
        subprocess.run(
            [*command, "-o", str(log), sys.executable, "-c", code],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        return tuple(steps(log.read_text(), str(top)))


CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)(?:<.*>)?$")
DESCRIPTOR = re.compile(r"(\d+|AT_FDCWD)<((?:\\x..|[^>])*)>")
TEXT = re.compile(r'"((?:\\x..)*)"')


def steps(log: str, top: str) -> list[Step]:
    """What a log says about files below a folder, with names relative to it."""
    found, at = list[Step](), defaultdict[str, int](int)

    def inside(path: str) -> str:
        return os.path.relpath(path, top) if path.startswith(top + "/") else ""

    for line in log.splitlines():
        call = CALL.match(line)
        if call is None or int(call[3]) < 0:
            continue
        name, arguments = call[1], call[2]
        fd = DESCRIPTOR.match(arguments)
        texts = [ast.literal_eval(f'b"{text}"') for text in TEXT.findall(arguments)]
        descriptor, opened = fd[1] if fd else "", _plain(fd[2]) if fd else ""
        path = inside(opened)
        if name == "openat":
            path = inside(_plain(texts[0].decode()))
            at[str(int(call[3]))] = 0
            if path and "O_CREAT" in arguments:
                found.append(Step("create", path))
            if path and "O_TRUNC" in arguments:
                found.append(Step("truncate", path))
        elif name == "pwrite64" and path:
            offset = int(arguments.rsplit(", ", 1)[1])
            found.append(Step("write", path, texts[0], offset))
        elif name == "write" and path:
            found.append(Step("write", path, texts[0], at[descriptor]))
            at[descriptor] += len(texts[0])
        elif name == "write" and descriptor == "2":
            found.append(Step("note", data=texts[0].strip()))
        elif name == "ftruncate" and path:
            found.append(Step("truncate", path, offset=int(arguments.rsplit(", ", 1)[1])))
        elif name in ("fsync", "fdatasync") and (path or opened == top):
            found.append(Step("sync", path or "."))
        elif name.startswith("mkdir"):
            path = inside(texts[0].decode())
            found += [Step("mkdir", path)] if path else []
        elif name.startswith("unlink"):
            path = inside(texts[0].decode())
            found += [Step("unlink", path)] if path else []
        elif name.startswith("rename"):
            old, new = (inside(text.decode()) for text in texts)
            found += [Step("rename", old, other=new)] if old else []
    return found


def _plain(text: str) -> str:
    return ast.literal_eval(f'b"{text}"').decode() if "\\x" in text else text


@dataclass
class File:
    """A file with what is on disk of it, and the writes that may be."""

    content: bytearray = field(default_factory=bytearray)
    pending: list[Step] = field(default_factory=list)

    def apply(self, step: Step) -> None:
        if step.what == "truncate":
            self.content[:] = self.content[: step.offset].ljust(step.offset, b"\0")
        else:
            self.content[:] = self.content.ljust(step.offset, b"\0")
            self.content[step.offset : step.offset + len(step.data)] = step.data


class Disk:
    """What is on disk, and what the running system shows."""

    def __init__(self) -> None:
        self.shown: dict[str, File | None] = {}  # None is a directory
        self.names: dict[str, File | None] = {}
        self.pending: list[tuple[Step, File | None]] = []  # creations, removals, renames

    def do(self, step: Step) -> None:
        """One step of the running process."""
        if step.what in ("create", "mkdir"):
            if step.path not in self.shown:
                self.shown[step.path] = File() if step.what == "create" else None
                self.pending.append((step, self.shown[step.path]))
        elif step.what in ("unlink", "rename"):
            file = self.shown.pop(step.path)
            if step.what == "rename":
                self.shown[step.other] = file
            self.pending.append((step, file))
        elif step.what == "sync" and self.shown.get(step.path) is None:
            folder = "" if step.path == "." else step.path
            mine = [x for x in self.pending if os.path.dirname(x[0].path) == folder]
            self.pending = [x for x in self.pending if x not in mine]
            for one in mine:
                self.name(*one)
        elif step.what == "sync":
            file = self.shown[step.path]
            assert file is not None
            for write in file.pending:
                file.apply(write)
            file.pending.clear()
        elif step.what in ("write", "truncate"):
            file = self.shown[step.path]
            assert file is not None
            file.pending.append(step)

    def name(self, step: Step, file: File | None) -> None:
        """Put a change of names on disk."""
        if step.what in ("create", "mkdir"):
            self.names[step.path] = file
        else:
            self.names.pop(step.path, None)
            if step.what == "rename":
                self.names[step.other] = file

    def lose_power(self, draw: random.Random) -> None:
        """Put a random choice of what is pending on disk."""
        for one in self.pending[: draw.randint(0, len(self.pending))]:
            self.name(*one)
        share = draw.choice((0.0, 0.5, 0.9, 1.0))
        for file in self.names.values():
            if file is None:
                continue
            some = [step for step in file.pending if draw.random() < share]
            if draw.random() < 0.5:
                draw.shuffle(some)
            for step in some:
                if step.what == "write" and draw.random() < 0.1:
                    torn = 512 * draw.randint(0, len(step.data) // 512)
                    step = Step("write", step.path, step.data[:torn], step.offset)
                file.apply(step)

    def write(self, top: Path) -> None:
        """Lay out what is on disk; a name is there if its folders are."""
        for path, file in sorted(self.names.items(), key=lambda item: len(item[0])):
            if not (top / path).parent.is_dir():
                continue
            if file is None:
                (top / path).mkdir()
            else:
                (top / path).write_bytes(file.content)


def replay(point: int, draw: random.Random, record: tuple[Step, ...]) -> str:
    """Lose power before a step and start again; what is wrong then, or nothing."""
    disk, acknowledged = Disk(), list[bytes]()
    for step in record[:point]:
        if step.what == "note":
            acknowledged.append(step.data)
        disk.do(step)
    disk.lose_power(draw)
    top = Path(tempfile.mkdtemp())
    try:
        disk.write(top)
        wrong = missing(top / "new" / "study", sum(b"job" in one for one in acknowledged))
        if b"merged" in acknowledged:
            wrong = wrong or missing(top / "merged", JOBS)
        return wrong
    finally:
        shutil.rmtree(top)


def missing(place: Path, jobs: int) -> str:
    """What a study lacks that was acknowledged, or has too much; nothing if all is well."""
    try:
        roll_back(place)
        store = Store.open(place)
    except UserError as error:
        return str(error) if jobs else ""
    found, lost = set(store.rows()), store.check()
    store.close()
    if lost:
        return f"lost {lost[:3]}"
    for number in range(JOBS):
        rows = set(many_rows(number))
        if (number < jobs and not rows <= found) or (rows & found and not rows <= found):
            return f"{len(rows - found)} rows of job {number} are gone, {jobs} were acknowledged"
    return ""


def chunk(number: int) -> Result:
    result, record = Result(), recorded()
    for one in range(CHUNK * number, CHUNK * (number + 1)):
        draw = random.Random(one)
        point = one % (len(record) + 1)  # every point in turn
        wrong = replay(point, draw, record)
        result.count("power loss", "faulty" if wrong else "right")
        if wrong:
            result.faults.append(f"point {point} of {len(record)}, seed {one}: {wrong}")
    return result


if __name__ == "__main__":
    if shutil.which("strace") is None:
        sys.exit("this campaign records system calls with strace, which is not installed")
    recorded()  # once, before the workers are forked
    sys.exit(campaign(chunk, CHUNK, 1000, __doc__ or ""))
