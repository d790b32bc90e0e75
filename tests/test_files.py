"""Files are written in full or not at all; folders of others are left alone."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lipscope._files import check_folder, claim_folder, whole_file
from lipscope._types import UserError


def test_what_was_written_takes_its_place(tmp_path):
    path = tmp_path / "rows.csv"
    for content in ("first", "second"):
        with whole_file(path) as draft:
            assert draft.suffix == ".csv" and draft.parent == tmp_path
            draft.write_text(content)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == content
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize(
    ("before", "outcome"),
    [(True, "the previous file is unchanged"), (False, "no file was written")],
)
def test_a_failure_leaves_what_was_there(tmp_path, before, outcome):
    path = tmp_path / "rows.csv"
    if before:
        path.write_text("before")
    with (
        pytest.raises(UserError, match=f"cannot write .*No space left on device; .*{outcome}"),
        whole_file(path) as draft,
    ):
        draft.write_text("half")
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"] * before


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "nowhere" / "rows.csv"
    with pytest.raises(UserError, match=r"cannot write .*nowhere"), whole_file(path) as draft:
        draft.write_text("x")


def test_a_link_is_followed_and_the_mode_is_kept(tmp_path):
    target, link = tmp_path / "below" / "rows.csv", tmp_path / "link.csv"
    target.parent.mkdir()
    target.write_text("first")
    target.chmod(0o600)
    link.symlink_to(target)
    with whole_file(link, typed=True) as draft:
        draft.write_text("second")
    assert link.is_symlink() and target.read_text() == "second"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [p.name for p in target.parent.iterdir()] == ["rows.csv"]


def test_a_link_that_leads_nowhere_yet_gets_its_target(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "rows.csv")
    with whole_file(tmp_path / "link", typed=True) as draft:
        draft.write_text("x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "rows.csv").read_text() == "x"


def test_a_fifo_is_written_into(tmp_path):
    fifo, received = tmp_path / "fifo.csv", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: received.append(fifo.read_text()), daemon=True)
    reader.start()
    with whole_file(fifo, typed=True) as draft:
        assert draft.suffix == ".csv" and draft.parent != tmp_path
        draft.write_text("rows")
    reader.join(timeout=20)
    assert received == ["rows"] and stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "link to a folder", "fifo"])
def test_a_name_that_nobody_typed_leads_nowhere(tmp_path, kind):
    victim, place = tmp_path / "thesis.tex", tmp_path / "study" / "report.html"
    place.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / {"link": "thesis.tex", "link to nothing": "x"}.get(kind, ""))
    victim.write_text("mine")
    with pytest.raises(UserError, match="cannot write"), whole_file(place):
        raise AssertionError("nothing is written")
    assert victim.read_text() == "mine" and not (tmp_path / "x").exists()
    assert [p.name for p in place.parent.iterdir()] == ["report.html"]


def test_a_second_name_of_a_file_keeps_its_content(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    os.link(tmp_path / "thesis.tex", tmp_path / "report.html")
    with whole_file(tmp_path / "report.html") as draft:
        draft.write_text("page")
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "page"


def test_a_draft_is_nobodys_link_and_no_more_readable_than_its_file(tmp_path):
    path, victim = tmp_path / "report.html", tmp_path / "thesis.tex"
    victim.write_text("mine")
    (tmp_path / ".unfinished-report.html").symlink_to(victim)
    path.touch()
    path.chmod(0o600)
    names = set()
    for _ in range(2):
        with whole_file(path) as draft:
            names.add(draft.name)
            assert stat.S_IMODE(draft.lstat().st_mode) == 0o600
            draft.write_text("page")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(names) == 2 and victim.read_text() == "mine"
    assert stat.S_IMODE(victim.stat().st_mode) != 0o600


def test_a_new_file_has_the_mode_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "rows.csv") as draft:
            draft.write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "rows.csv").stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["link", "hard link", "content", "directory", "fifo"])
def test_a_lock_is_taken_only_on_a_lock_file(tmp_path, kind):
    victim, lock = tmp_path / "thesis.tex", tmp_path / "run" / "study.lock"
    lock.parent.mkdir()
    victim.write_text("mine" if kind == "link" else "")
    victim.chmod(0o600)
    if kind == "link":
        lock.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, lock)
    elif kind == "content":
        lock.write_text("pid 1")
    elif kind == "directory":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with pytest.raises(UserError, match="is not the lock file that lipscope writes"):
        claim(lock.parent)
    assert victim.read_text() == ("mine" if kind == "link" else "")
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


@pytest.mark.parametrize("minor", [3, 7], ids=["null", "full"])
def test_a_device_stays_a_device(tmp_path, minor):
    """Nodes with the numbers of /dev/null and /dev/full, in a scratch folder."""
    node = tmp_path / "device"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        node.open("wb").close()
    except OSError as error:
        pytest.skip(f"no device can be made here ({error.strerror})")
    if minor == 3:
        with whole_file(node, typed=True) as draft:
            draft.write_text("rows")
    else:
        with (
            pytest.raises(UserError, match="No space left on device; no file was written"),
            whole_file(node, typed=True) as draft,
        ):
            draft.write_text("rows")
    assert stat.S_ISCHR(node.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["device"]


def test_an_open_descriptor_is_written_into(tmp_path):
    code = (
        "import sys; from pathlib import Path; from lipscope._files import whole_file\n"
        "with whole_file(Path(sys.argv[1]), typed=True) as draft: draft.write_text('rows')"
    )
    for name in ("/dev/fd/1", "/dev/stdout"):
        command = [sys.executable, "-c", code, name]
        assert subprocess.run(command, capture_output=True, text=True).stdout == "rows"
        with open(tmp_path / "file", "w+") as file:
            assert subprocess.run(command, stdout=file).returncode == 0
            # The shell's descriptor and the name still lead to one file.
            assert os.fstat(file.fileno()).st_ino == (tmp_path / "file").stat().st_ino
            assert (tmp_path / "file").read_text() == "rows"


@pytest.mark.parametrize("name", ["", ".", "a\0b"])
def test_what_is_no_name_of_a_file_is_refused(name):
    with pytest.raises(UserError, match="is not the name of a file"), whole_file(Path(name)):
        raise AssertionError("nothing is written")


def test_a_directory_is_not_overwritten(tmp_path):
    with pytest.raises(UserError, match="it is a directory"), whole_file(tmp_path):
        raise AssertionError("nothing is written")


def claim(folder: Path):
    return claim_folder(folder, "a study", ("study.sqlite",), "study.lock")


def test_a_folder_is_claimed_once_and_again_after_a_release(tmp_path):
    held = claim(tmp_path / "new" / "run")
    with pytest.raises(UserError, match="another run is writing to"):
        claim(tmp_path / "new" / "run")
    held.release()
    claim(tmp_path / "new" / "run").release()


def test_a_killed_process_holds_no_folder(tmp_path):
    code = (
        "import os, signal, sys; from tests.test_files import claim; from pathlib import Path\n"
        "held = claim(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=root)
    assert done.returncode == -9 and (tmp_path / "run" / "study.lock").exists()
    claim(tmp_path / "run").release()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "study.lock").touch()
    (tmp_path / ".unfinished-study.sqlite").touch()
    claim(tmp_path).release()  # what a run that was killed at once leaves
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"neither a study nor empty \(it contains thesis.tex\)"):
        claim(tmp_path)
    with pytest.raises(UserError, match="is a file; --out takes a directory"):
        claim(tmp_path / "thesis.tex")
    for below in (tmp_path / "thesis.tex" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot write to"):
            check_folder(below, "a study", ())
    (tmp_path / "study.sqlite").touch()
    claim(tmp_path).release()
