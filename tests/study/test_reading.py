"""What may be measured, in every form it can be given in, and what may not."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import lipscope as ls
from lipscope._types import UserError
from lipscope.cli import main
from lipscope.linalg.local import local_lipschitz
from lipscope.models._transformers_internals import random_model
from lipscope.models.loading import load
from lipscope.papers.charlm import train_character_model
from lipscope.study import reading
from lipscope.study.reading import Prose, SampledText, TextColumn, content, read
from lipscope.study.run import measure
from tests.models.small import small_configs
from tests.study.tiny import PROSE

WINDOWS: dict[str, Any] = {"lengths": (4, 8), "samples": 2}
WHOLE: dict[str, Any] = {}


def test_a_string_a_file_a_list_and_ids_are_the_same_text(model, prose, tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(prose)
    words = prose.split()
    readings = [
        read(model, given, None, **WINDOWS)
        for given in (
            prose,
            path,
            [" ".join(words[:100]), " ".join(words[100:])],
            model.encode(prose),
        )
    ]
    assert {reading.window(8, 1) for reading in readings} == {readings[0].window(8, 1)}
    assert [reading.tokens for reading in readings] == [300] * 4
    assert [reading.option for reading in readings] == [
        ("--text", "-"),
        ("--text", str(path)),
        None,
        None,
    ]


def test_digests_tell_texts_apart(model, prose):
    ids = model.encode(prose)
    given = [prose, prose + " ba", [prose, "ba"], ids, [ids], ids[:-1]]
    windows = [read(model, text, None, **WINDOWS).digest for text in given]
    assert len(set(windows)) == 5  # ids in one row are the same as ids
    short = [ids[:8], [ids[:4], ids[4:8]], [ids[:5], ids[5:8]]]
    whole = [read(model, text, None, **WHOLE).digest for text in short]
    assert len({*windows, *whole}) == 8
    assert read(model, short[0], None, **WINDOWS).digest != whole[0]


def test_no_text_means_the_embedded_one(model):
    reading = read(model, None, None, **WINDOWS)
    assert (
        reading.name == "Python's help topics" and reading.tokens > 10_000 and reading.option == ()
    )


@pytest.mark.parametrize(
    ("text", "inputs", "choice", "told"),
    [
        (7, None, WHOLE, "text must be a string"),
        ([], None, WHOLE, "text must be a string"),
        ([[]], None, WHOLE, "text must be a string"),
        ([1.5], None, WHOLE, "text must be a string"),
        (["ba", 3], None, WHOLE, "text must be a string"),
        (b"ba", None, WHOLE, "text must be a string"),
        ([[1, 2], 3], None, WHOLE, "text must be a string"),
        (torch.tensor([0.5]), None, WHOLE, "text must be a string"),
        ([1, -1], None, WHOLE, "token id -1 is not in the vocabulary"),
        ([1, 134], None, WHOLE, "token id 134 is not in the vocabulary"),
        ([1] * 49, None, WHOLE, "length 49 is above the 48 positions"),
        (Path("no such file"), None, WHOLE, "cannot read the text"),
        (["", " "], None, WHOLE, "the text is empty"),
        ("ba", torch.zeros(1, 4, 8), WHOLE, "not both"),
        (None, torch.zeros(1, 4, 8), WINDOWS, "measured whole"),
        (None, torch.zeros(8), WHOLE, "embeddings"),
        (None, torch.zeros(2, 4, 8, dtype=torch.int64), WHOLE, "floating-point"),
        (None, torch.zeros(0, 4, 8), WHOLE, "at least one"),
        (None, torch.full((1, 4, 8), torch.nan), WHOLE, "finite"),
        (None, [[0.5]], WHOLE, "got list"),
        (None, {"inputs_embeds": [[0.5]]}, WHOLE, r"inputs\['inputs_embeds'\] must be a tensor"),
        (
            None,
            {"input_ids": torch.ones(2, 4), "attention_mask": torch.ones(3, 4)},
            WHOLE,
            r"inputs\['attention_mask'\] must be a tensor with one row per sample",
        ),
        (None, torch.zeros(1, 49, 8), WHOLE, "length 49 is above the 48 positions"),
    ],
)
def test_what_cannot_be_measured_is_told(model, text, inputs, choice, told):
    with pytest.raises(UserError, match=told):
        read(model, text, inputs, **choice)


def test_embeddings_of_another_width_are_told(model):
    with pytest.raises(UserError, match="does not run on inputs_embeds"):
        measure(model, inputs=torch.zeros(1, 4, 9))


def test_pixels():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
    )
    model = load(ViTModel(config))
    pixels = torch.randn(2, 3, 8, 8)
    study = measure(model, inputs=pixels, scopes=("attention",))
    assert [(row.n, row.sample) for row in study.rows] == [(5, 0), (5, 1)] and not study.failed
    with pytest.raises(UserError, match="reads pixel_values, not text"):
        measure(model, "a text")
    with pytest.raises(UserError, match="pixel values"):
        measure(model, inputs=torch.randn(2, 8))


@pytest.mark.wide
def test_sound():
    """What an audio model reads is measured like any other input, sample by sample."""
    torch.manual_seed(0)
    model = load(random_model(Wav2Vec2Model, next(small_configs(Wav2Vec2Config))).eval())
    sound = torch.randn(2, 1200)
    study = measure(model, inputs=sound, scopes=("attention", "block"), tol=1e-9)
    assert not study.failed and len({row.n for row in study.rows}) == 1
    for sample in range(2):
        sites = model.sites(inputs={"input_values": sound[sample : sample + 1]}, scopes=["block"])
        expected = [local_lipschitz(site.f, site.X[0], tol=1e-9).value for site in sites]
        found = [row.value for row in study.rows if (row.scope, row.sample) == ("block", sample)]
        assert found == pytest.approx(expected, rel=1e-7)
    named = measure(model, inputs={"input_values": sound}, scopes=("block",), tol=1e-9)
    assert named.info.identity.text == study.info.identity.text
    with pytest.raises(UserError, match="reads input_values, not text"):
        measure(model, "a text")


@pytest.mark.wide
def test_several_inputs_by_name():
    """Another picture changes the numbers of its own sample and of no other."""
    torch.manual_seed(0)
    model = load(random_model(CLIPModel, next(small_configs(CLIPConfig))).eval())
    ids = torch.tensor([[1, 5, 7, 2], [1, 3, 2, 2]])
    pixels = torch.randn(2, 3, 32, 32)
    study = measure(model, inputs={"input_ids": ids, "pixel_values": pixels}, scopes=("block",))
    other = {"input_ids": ids, "pixel_values": torch.stack([pixels[0], pixels[0]])}
    changed = measure(model, inputs=other, scopes=("block",))
    assert study.info.identity.text != changed.info.identity.text

    def values(found, sample):
        return [row.value for row in found.rows if row.sample == sample]

    assert values(study, 0) == pytest.approx(values(changed, 0), rel=1e-6)
    assert values(study, 1) != pytest.approx(values(changed, 1), rel=1e-5)


def test_a_column_of_a_table_without_a_header_has_a_number(tmp_path):
    file = tmp_path / "news.csv"
    file.write_text('"3","First title","a, b"\n"4","Second title","c"\n')
    assert TextColumn(file, "2").read() == "First title\nSecond title"
    assert TextColumn(file, "3").read() == "a, b\nc"  # although 3 stands in the first line
    for missing in ("0", "4", "title"):
        with pytest.raises(UserError, match="without a header line, give the number"):
            TextColumn(file, missing).read()


def test_several_texts_record_the_options_that_give_them(model, tmp_path):
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        file.write_text('{"body": "' + "ba be bi bo bu " * 4 + '"}\n')
    given = [word for file in files for word in ("--text", str(file))]
    assert read(model, files, **WINDOWS).option == tuple(given)
    columns = [TextColumn(file, "body") for file in files]
    assert read(model, columns, **WINDOWS).option == (*given, "--column", "body")
    # A command line has one column for all files, and cannot hold a text itself.
    assert read(model, [columns[0], files[1]], **WINDOWS).option is None
    assert read(model, [files[0], "ba be bi bo bu " * 4], **WINDOWS).option is None


def windows(**changes) -> SampledText:
    fields = {"ids": tuple(range(100)), "lengths": (8, 16), "samples": 3, "seed": 0, "digest": ""}
    return SampledText(**{**fields, **changes})


def test_offsets_are_fixed_for_ever():
    """Numbers that studies on disk depend on: a change of them is a new numeric version."""
    drawn = [
        windows(ids=tuple(range(999 + n)), seed=seed).window(n, sample)[0]
        for n, sample, seed in ((8, 0, 0), (8, 1, 0), (16, 0, 0), (8, 0, 1))
    ]
    assert drawn == [772, 498, 549, 105]


def test_a_window_is_consecutive_and_depends_on_its_own_number_alone():
    few, many = windows(), windows(lengths=(16, 32, 8), samples=50)
    for n, sample in few.pairs:
        window = few.window(n, sample)
        assert window == tuple(range(window[0], window[0] + n))
        assert window == many.window(n, sample)
    assert few.batch(8, (2, 0)).tolist() == [list(few.window(8, 2)), list(few.window(8, 0))]


def test_every_place_can_be_drawn_the_last_one_too():
    starts = {windows(samples=1).window(96, sample)[0] for sample in range(200)}
    assert starts == {0, 1, 2, 3, 4}
    assert windows().window(100, 7) == tuple(range(100))


def test_special_tokens_count_towards_n():
    framed = windows(before=(-1,), after=(-2, -3))
    window = framed.window(8, 0)
    assert len(window) == 8 and window[0] == -1 and window[-2:] == (-2, -3)
    assert window[1:6] == tuple(range(window[1], window[1] + 5))


def test_default_lengths_leave_room_for_the_text_between_special_tokens(model, prose, monkeypatch):
    """Eight special tokens fill the shortest default length."""
    monkeypatch.setattr(reading, "special_frame", lambda model: ((2,) * 4, (3,) * 4))
    assert read(model, prose, special_tokens=True).lengths == (16, 32)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_is_a_different_draw(seed):
    assert windows(seed=seed).window(8, 0) != windows(seed=seed + 1).window(8, 0)


@pytest.fixture
def named(tmp_path, monkeypatch) -> str:
    """The name of a text in the current directory."""
    (tmp_path / "val.txt").write_text(PROSE)
    monkeypatch.chdir(tmp_path)
    return "val.txt"


def test_names_of_files_in_every_form_are_refused(named, tmp_path):
    (tmp_path / "link").symlink_to(named)
    os.mkfifo(tmp_path / "pipe")
    for name in (named, "./val.txt", str(tmp_path / named), "link", "pipe", "/dev/null"):
        with pytest.raises(ls.UserError, match=r"is the name of a file; give Path\(.* to read"):
            content(name)
    assert content(Path(named)) == PROSE
    assert content(Prose(named)) == named


def test_texts_that_cannot_be_files_or_name_directories_are_texts(named, tmp_path):
    (tmp_path / "data").mkdir()
    texts = ["", ".", "data", "no such file", f"{named}\n", "a\0b", "\ud800", "x" * 10**6, PROSE]
    assert [content(text) for text in texts] == texts


@pytest.mark.parametrize(
    ("column", "cells"),
    [("1", ["one", "two"]), ("2", ["first, quoted", "second"]), ("3", ["7", "8"])],
)
def test_columns_of_a_table_without_a_header_have_numbers(tmp_path, column, cells):
    (tmp_path / "t.csv").write_text('one,"first, quoted",7\ntwo,second,8\n')
    assert list(TextColumn(tmp_path / "t.csv", column)._cells(_text(tmp_path))) == cells
    for beyond in ("0", "4", "name"):
        with pytest.raises(ls.UserError, match="has no column"):
            list(TextColumn(tmp_path / "t.csv", beyond)._cells(_text(tmp_path)))


def _text(folder: Path) -> str:
    return (folder / "t.csv").read_text()


@pytest.mark.parametrize(
    "call",
    [
        lambda model, text: ls.measure(model, text, lengths=[2]),
        lambda model, text: ls.audit_model(model, text),
        lambda model, text: ls.attack_model(model, text, ls.AttackPlan("direction")),
        lambda model, text: ls.error_budget(model, text),
        lambda model, text: ls.check_run(model, model.trunk, text),
    ],
    ids=["measure", "audit_model", "attack_model", "error_budget", "check_run"],
)
def test_public_functions_refuse_names_of_files(model, named, call):
    for text in (named, ["some words", named]):
        with pytest.raises(ls.UserError, match=r"'val\.txt' is the name of a file"):
            call(model, text)


def test_training_refuses_names_of_files(named, tmp_path):
    with pytest.raises(ls.UserError, match="is the name of a file"):
        train_character_model(named, out=tmp_path / "trained")


def test_the_command_line_reads_names_from_stdin_as_text(tiny, named, monkeypatch):
    """`printf val.txt | lipscope measure --text -` measures these characters."""
    read, write = os.pipe()
    os.write(write, named.encode())
    os.close(write)
    with open(read) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["measure", tiny, "--text", "-", "--lengths", "2", "--quiet"]) == 0
