"""Join studies of one model, text and set of options, in any order and as often as you like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lipscope._files import whole_file
from lipscope._types import UserError
from lipscope.study.directory import FILE, claim, require_parts
from lipscope.study.records import Row, StudyHeader
from lipscope.study.store import Store, content, damage
from lipscope.study.validation import COMMANDS, INFO


class Merged(NamedTuple):
    """What a merge found.

    content:  how much the merged study holds, as in "12 rows"
    disputed: rows that several parts have, with other numbers
    damaged:  a sentence for each part that has lost something; the rest of it is there
    """

    content: str
    disputed: int
    damaged: list[str]


class Joined(NamedTuple):
    """A store in memory, and the number of rows that its parts disagree on."""

    store: Store
    disputed: int


def join(stores: Iterable[Store]) -> Joined:
    """Everything intact in some stores of one study.

    Of several rows with one key, one that has a value is kept before one that failed; among equals
    the choice is by content. So neither the order nor a part that comes twice changes anything.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    records: dict[tuple[str, str], Any] = {}
    commands: dict[str, Any] = {}
    disputed: set[tuple[Any, ...]] = set()
    info: StudyHeader | None = None
    for store in stores:
        info = info or store.info()
        for row in store.rows():
            known = rows.setdefault(row[:8], row)
            if not known.failing and not row.failing and _numbers(known) != _numbers(row):
                disputed.add(row[:8])
            rows[row[:8]] = min(known, row, key=lambda r: (r.failing, repr(r)))
        for kind, key, value in store.all_records():
            records[kind, key] = min(records.get((kind, key), value), value, key=repr)
        commands |= {repr(command): command for command in store.commands()}
    assert info is not None
    records.pop((INFO, COMMANDS), None)
    joined = Store.create(None, info)
    joined.write(rows.values())
    joined.put_all((*name, value) for name, value in records.items())
    joined.add_commands(command for _, command in sorted(commands.items()))
    return Joined(joined, len(disputed))


def merge(out: Path, parts: Sequence[Path]) -> Merged:
    """Write everything in some studies, and in that in `out` if there is one, to `out`.

    Args:
        out: A new or empty directory, or one that an earlier merge wrote. It is replaced as a
            whole, at the end.
        parts: Directories of studies of one model, text and set of options.

    Returns:
        What was found.

    Raises:
        UserError: If a part differs in something that decides its numbers, or cannot be read.
    """
    given = list(dict.fromkeys(parts))
    for one in given:  # before anything is written
        _check_part(given[0], one)
    with claimed(out):
        if (out / FILE).exists() and out not in given:
            given.insert(0, out)
            _check_part(given[1], out)
        damaged: list[str] = []
        joined, disputed = join(_opened(given, out, damaged))
        write_whole(joined, out)
    return Merged(content=content(joined), disputed=disputed, damaged=damaged)


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Keep other processes from writing to the directory of a study, which may be a new one."""
    lock = claim(directory)
    try:
        yield
    finally:
        lock.release()


def write_whole(store: Store, directory: Path) -> None:
    """Write a store that is in memory to a claimed directory: at once, or not at all."""
    with whole_file(directory / FILE) as draft:
        draft.write_bytes(store.to_bytes())


def _check_part(first: Path, other: Path) -> None:
    with closing(Store.open(first)) as one, closing(Store.open(other)) as two:
        require_parts(one.info().identity, two.info().identity, first, other)


def _opened(parts: Iterable[Path], out: Path, damaged: list[str]) -> Iterator[Store]:
    """One store after the other, open while it is used; what is lost in it is noted."""
    for part in parts:
        with closing(Store.open(part)) as store:
            if store.check():
                if part == out:
                    raise UserError(damage(store))  # a damaged study is not written to
                damaged.append(damage(store))
            yield store


def _numbers(row: Row) -> tuple[Any, ...]:
    """Return the numbers that must agree between two measurements of one place."""
    return row.value, row.lower, row.upper
