"""Files written in full or not at all, folders claimed, and untrusted text made safe to display."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lipscope._types import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

DRAFT = ".unfinished-"
"""Prefix of the temporary files below; a killed process may leave one behind."""

Kind = Literal["missing", "file", "link", "directory", "special"]


def kind_of(path: Path) -> Kind:
    """Say what a name stands for itself, without following a link; "file" is a regular one."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISDIR(mode):
        return "directory"
    return "file" if stat.S_ISREG(mode) else "special"


@contextmanager
def whole_file(path: Path, *, typed: bool = False) -> Iterator[Path]:
    """Yield a temporary path whose content is at `path` when the block ends, or none of it.

    A regular file is replaced atomically and keeps its mode. Of two writers of one file, one
    replaces the other's file as a whole. The temporary name keeps the suffix of `path`, because
    some writers choose a format by it.

    Args:
        path: The file to write.
        typed: Whether the user typed this name. Then a link is followed, and a device, a FIFO or
            /dev/fd/N is written into, after the block has succeeded. A name that lipscope chose
            itself may have been laid out by a stranger: anything but a regular file is refused.
    """
    if not path.name or "\0" in str(path):
        raise UserError(f"cannot write {str(path)!r}: it is not the name of a file")
    if os.path.isdir(path):
        raise UserError(f"cannot write {path}: it is a directory; give the name of a file in it")
    try:
        if typed and _is_stream(path):
            with tempfile.TemporaryDirectory() as folder:
                draft = Path(folder) / path.name
                yield draft
                with open(draft, "rb") as source, open(path, "wb") as target:
                    shutil.copyfileobj(source, target)
            return
        if not typed:
            require_plain(path)
        # A link that was typed stays, and what it leads to is replaced.
        with _replacing(Path(os.path.realpath(path)) if typed else path) as draft:
            yield draft
    except OSError as error:
        before = "the previous file is unchanged" if os.path.isfile(path) else "no file was written"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {before}") from error


def require_plain(path: Path) -> None:
    """Raise UserError unless `path` is a regular file, or nothing yet."""
    if kind_of(path) not in ("missing", "file"):
        raise UserError(
            f"cannot write {path}: it is not a regular file, and lipscope follows no link that "
            "you did not name; remove it, or give another directory"
        )


def _is_stream(path: Path) -> bool:
    """Whether a rename to `path` would destroy something that is not a file of its own."""
    # A link such as /dev/stdout may lead to a regular file, which another process holds open.
    folder = os.path.realpath(path.parent)
    if folder == "/dev" or folder.startswith("/proc/"):
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # it does not exist yet, or writing it will raise the error
        return False


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    try:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
    except FileNotFoundError:
        mode = None
    # Nobody can lay out a link at a random name, and O_EXCL opens nothing that is there. A draft is
    # never more readable than the file that it will replace.
    draft = path.with_name(f"{DRAFT}{secrets.token_hex(8)}-{path.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(draft, flags, 0o666 if mode is None else 0o600))
    try:
        yield draft
        if mode is not None:
            draft.chmod(mode)
        _sync(draft, os.O_RDWR)
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()
    with suppress(OSError):  # some file systems cannot sync a folder; the file itself is on disk
        _sync(path.parent, os.O_RDONLY)


def remove_drafts(path: Path) -> None:
    """Remove what killed writers of `path` left; only for a file that is written under a lock."""
    for name in os.listdir(path.parent):
        if name.startswith(DRAFT) and name.endswith(path.name):
            with suppress(OSError):  # a directory of this name is not a draft
                os.unlink(path.parent / name)


def _sync(path: Path, mode: int) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    opened = os.open(path, mode)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_folder(folder: Path, noun: str, marks: Collection[str], lock: str | None = None) -> None:
    """Refuse an output folder that cannot be written, or that holds something else of the user's.

    Args:
        folder: It may be new, empty, or hold one of the files `marks`.
        noun: What a folder with one of these files is, as in "a study".
        marks: Names of the files that make it one.
        lock: Name of a file that does not count: the lock of a run that was killed early.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{folder} is a file; --out takes a directory")
    try:
        held = sorted(os.listdir(folder))
    except FileNotFoundError:
        held = []
    except OSError as error:
        raise _unwritable(folder, error) from error
    strangers = [name for name in held if name != lock and not name.startswith(DRAFT)]
    if strangers and not set(held) & set(marks):
        raise UserError(
            f"{folder} is neither {noun} nor empty (it contains {strangers[0]}); "
            "give --out a new or empty directory"
        )
    nearest = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write to {folder} ({nearest} is not writable); give --out another directory"
        )


def claim_folder(folder: Path, noun: str, marks: Collection[str], lock: str) -> BaseFileLock:
    """Create an output folder, if need be, and lock it against other processes.

    Args:
        folder: The folder; see `check_folder` for what it may hold.
        noun: What a folder with one of the marks is, as in "a study".
        marks: Names of the files that make it one.
        lock: Name of the lock file, which stays in the folder.

    Returns:
        The acquired lock. The kernel releases it when the process ends, however it ends.
    """
    from filelock import FileLock, Timeout  # late: reading a study locks nothing

    check_folder(folder, noun, marks, lock)
    if os.path.lexists(folder / lock):
        found = os.lstat(folder / lock)
        # The lock file of another program may be opened for writing: it has to be lipscope's own.
        if not stat.S_ISREG(found.st_mode) or found.st_size or found.st_nlink > 1:
            raise UserError(
                f"{folder / lock} is not the lock file that lipscope writes, which is empty and no "
                "link; remove it, or give another --out"
            )
    # thread_local: a store may be closed by another thread than the one that opened it. No soft
    # lock: a file that alone is the lock would outlive a killed process.
    held = FileLock(folder / lock, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        whole = folder.absolute()
        new = [path for path in (whole, *whole.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in new:  # each is on disk before something is put into it
            with suppress(OSError):  # some file systems cannot sync a folder
                _sync(path.parent, os.O_RDONLY)
        held.acquire()
    except Timeout as error:
        raise UserError(
            f"another run is writing to {folder}; wait for it, or give another --out"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise _unwritable(folder, error) from error
    return held


def _unwritable(folder: Path, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or error
    return UserError(f"cannot write to {folder} ({why}); give --out another directory")


def for_terminal(text: str, width: int | None = None) -> str:
    """Escape control, bidi and other invisible characters, so that text cannot drive a terminal."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
    return shown if width is None or len(shown) <= width else shown[: width - 1] + "…"


def for_spreadsheet(text: str) -> str:
    """Prefix text that a spreadsheet would run as a formula with an apostrophe."""
    return (
        "'" + text
        if text.lstrip()[:1] in ("=", "+", "-", "@") or text[:1] in ("\t", "\r", "\n")
        else text
    )


def on_one_line(error: BaseException) -> str:
    """The message of a third-party error, short enough to quote and safe to display."""
    return for_terminal(" ".join(str(error).split())[:200]) or type(error).__name__
