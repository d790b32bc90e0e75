"""Penn Treebank in both forms is one text, and half of it is refused."""

import pytest

from lipscope import UserError
from lipscope.papers.charlm.characters import UNKNOWN, CharacterText
from lipscope.papers.setting import Setting, penn_treebank, plain_text

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
