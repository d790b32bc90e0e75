"""A text becomes windows of characters, Penn Treebank in both forms too; bad texts are refused."""

import math
from pathlib import Path

import pytest
import torch

from lipscope import UserError
from lipscope.papers.charlm.characters import UNKNOWN, CharacterText, read_characters
from lipscope.papers.setting import Setting, penn_treebank, plain_text

LINE = "the quick brown fox jumps over the lazy dog. "


def test_windows_are_the_text_and_targets_what_follows():
    text = CharacterText.of(LINE * 10, 16)
    whole = "".join(text.alphabet[i] for i in torch.cat([text.learned, text.held_out]))
    assert whole == LINE * 10
    assert UNKNOWN in text.alphabet and list(text.alphabet) == sorted(text.alphabet)
    for inputs, targets in (
        text.draw(5, 16, torch.Generator().manual_seed(0)),
        text.test_windows(2, 16),
    ):
        for row, following in zip(inputs, targets, strict=True):
            window = "".join(text.alphabet[i] for i in row)
            assert window + text.alphabet[following[-1]] in LINE * 10
            assert torch.equal(row[1:], following[:-1])


def test_test_windows_do_not_overlap_and_never_leave_the_held_out_part():
    text = CharacterText.of(LINE * 40, 16)
    for most in (1, 3, 7, 1000):
        inputs, targets = text.test_windows(most, 16)
        assert len(inputs) == min(most, (len(text.held_out) - 1) // 16)
        assert targets.shape == inputs.shape
    everything = text.test_windows(1000, 16)[0].flatten()
    assert torch.equal(everything, text.held_out[: len(everything)])


def test_frequencies_alone_cost_the_entropy():
    text = CharacterText.of("ab" * 5000, 8)
    assert text.unigram_loss == pytest.approx(math.log(2), rel=1e-3)
    assert text.bigram_loss < 1e-3


def test_pairs_cost_what_counting_them_says():
    text = CharacterText.of("abacad" * 1000, 8)
    # After a, each of b, c, d has a third; after those, a always follows: half of them cost log 3.
    assert text.bigram_loss == pytest.approx(math.log(3) / 2, rel=0.02)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"too short", "9 characters"),
        (b"", "0 characters"),
        (b"a" * 500, "repeats a single character"),
        (b"\xff\xfe" * 500, "not UTF-8 text (byte 0)"),
    ],
)
def test_bad_texts_are_refused_in_words(tmp_path, content, complaint):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_characters(path, 16)
    assert complaint in str(refused.value)


@pytest.mark.parametrize("place", [Path("/nowhere/at/all"), Path(".")])
def test_a_file_that_cannot_be_read_is_named(place):
    with pytest.raises(UserError, match="cannot read the text"):
        read_characters(place, 16)


def test_line_ends_of_other_systems_are_one_character(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n" * 20)
    assert "\r" not in read_characters(tmp_path / "a.txt", 4).alphabet


WORDS = " no it was n't black monday \n but while the <unk> did n't fall \n" * 3
SPELLED = "\n".join(" ".join(line.strip().replace(" ", "_")) for line in WORDS.splitlines())


def test_both_forms_give_the_same_text():
    assert plain_text(SPELLED) == plain_text(WORDS)
    assert plain_text(WORDS).splitlines()[:2] == [
        "no it was n't black monday",
        "but while the <unk> did n't fall",
    ]


def test_the_parts_keep_their_files(tmp_path):
    (tmp_path / "ptb.char.train.txt").write_text(SPELLED)
    (tmp_path / "ptb.char.test.txt").write_text(" z e b r a _ z e b r a \n")
    setting = Setting(texts=tmp_path)
    text = penn_treebank(setting, context=8)
    read = "".join(text.alphabet[i] for i in text.held_out)
    assert read == "zebra zebra" and "z" in text.alphabet and UNKNOWN in text.alphabet
    assert "".join(text.alphabet[i] for i in text.learned) == plain_text(WORDS)
    assert not any(what.startswith("stand-in") for what in setting.used.values())


def test_prose_stands_in_where_there_are_no_files():
    setting = Setting()
    assert len(penn_treebank(setting, context=8).alphabet) > 30
    assert all(what.startswith("stand-in") for what in setting.used.values())


def test_one_file_without_the_other_is_refused(tmp_path):
    (tmp_path / "ptb.char.train.txt").write_text(SPELLED)
    with pytest.raises(UserError, match=r"ptb\.char\.train\.txt but not ptb\.char\.test\.txt"):
        penn_treebank(Setting(texts=tmp_path), context=8)


def test_a_part_that_is_too_short_is_refused():
    with pytest.raises(UserError, match="has 5 characters"):
        CharacterText.of_parts("a long text of characters", "short", context=8)
