"""Files are written in full or not at all, and leave nothing else behind."""

import pytest

from lipscope._files import whole_file
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
