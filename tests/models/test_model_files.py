"""Only regular files of bounded size inside the folder are read."""

import json
import os

import pytest

from lipscope._types import UserError
from lipscope.models import model_files
from lipscope.models.loading import load
from lipscope.models.model_files import checked_file, memory_here, read_json, size_of
from tests.models.test_loading import words
from tests.models.zoo import make


def link(target):
    return lambda path: path.symlink_to(target)


def sparse(path):
    path.touch()
    os.truncate(path, 10**12)


WRONG = {
    "link outside": (link("../outside"), "leads out of the folder; put the file itself there"),
    "link to a device": (link("/dev/zero"), "leads out of the folder"),
    "link to itself": (link("vocab.txt"), "cannot be read"),
    "dangling link": (link("nothing"), "cannot be read"),
    "FIFO": (os.mkfifo, "not a regular file"),
    "folder": (os.mkdir, "not a regular file"),
    "too large": (sparse, "has 931 GiB, more than the 256 MiB"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_plain_file_is_refused(case, tmp_path):
    make_it, message = WRONG[case]
    (tmp_path / "outside").touch()
    folder = tmp_path / "model"
    folder.mkdir()
    make_it(folder / "vocab.txt")
    with pytest.raises(UserError, match=f"^it: vocab.txt .*{message}"):
        checked_file(folder / "vocab.txt", "it")


def test_links_inside_the_folder_are_fine(tmp_path):
    (tmp_path / "real").write_text("{}")
    (tmp_path / "config.json").symlink_to("real")
    assert read_json(tmp_path / "config.json", "it") == {}


def test_the_layout_of_the_hubs_cache_is_read_and_its_blobs_only(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b"
    make("llama").save_pretrained(snapshot)
    words().save_pretrained(snapshot)
    (blobs / "blobs").mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / "blobs" / str(i))
        path.symlink_to(f"../../blobs/{i}")
    assert load(str(snapshot)).card.weights == load(make("llama")).card.weights
    (tmp_path / "outside").write_text("{}")
    (snapshot / "vocab.json").symlink_to("../../../outside")
    with pytest.raises(UserError, match="leads out of the folder"):
        load(str(snapshot))


def test_a_folder_may_itself_be_a_link(tmp_path):
    make("llama").save_pretrained(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert load(str(tmp_path / "link")).card.weights == load(make("llama")).card.weights


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 65 + "{}" + "}" * 65, "more than 64 levels"),
        ("[]", "must contain a JSON object, got list"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_json_of_the_wrong_form_is_refused(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_json(tmp_path / "config.json", "it")


def test_the_deepest_json_that_is_read(tmp_path):
    content = {"a": 1}
    for _ in range(model_files.DEPTH - 1):
        content = {"a": content}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_json(tmp_path / "config.json", "it") == content
    (tmp_path / "config.json").write_text(json.dumps({"a": content}))
    with pytest.raises(UserError, match="nested more than 64"):
        read_json(tmp_path / "config.json", "it")


def test_memory_is_that_of_the_container(tmp_path, monkeypatch):
    total = memory_here()
    assert total > 1 << 28
    monkeypatch.setattr(model_files, "CGROUP", tmp_path / "memory.max")
    for content, expected in (("1000\n", 1000), ("max\n", None), ("9" * 30, None)):
        (tmp_path / "memory.max").write_text(content)
        assert memory_here() == expected if expected else memory_here() >= total


def test_sizes_for_readers():
    assert [size_of(n) for n in (5, 2048, 3 << 30, 10**16)] == [
        "5 bytes",
        "2 KiB",
        "3 GiB",
        "8.88 PiB",
    ]
