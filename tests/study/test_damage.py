"""Commands on damaged studies: one sentence, exit code 3, and a repaired copy beside."""

from collections import Counter

import pytest

from lipscope.cli import main
from lipscope.study.directory import FILE
from lipscope.study.study import DamageWarning, Study
from tests.study.damage import BAD, campaign, damaged, make


@pytest.fixture
def place(tmp_path):
    """A study in which one byte of a row is wrong, and its intact rows."""
    whole = make(tmp_path / "s")
    rows = Study.open(tmp_path / "s").rows
    at = whole.index(b"converged") + 3
    (tmp_path / "s" / FILE).write_bytes(damaged(whole, at, "bit"))
    return tmp_path / "s", rows


@pytest.mark.parametrize("verb", ["show", "export", "report"])
def test_a_command_ends_with_3_and_one_sentence(place, verb, capsys):
    assert main([verb, str(place[0])]) == 3
    said = capsys.readouterr()
    told = [line for line in said.err.splitlines() if "damaged" in line]
    assert len(told) == 1 and told[0].startswith(f"lipscope: {place[0]} is damaged: lost sigma of ")
    assert "Traceback" not in said.err


def test_python_warns_and_gives_the_rest(place):
    study = Study.open(place[0])
    with pytest.warns(DamageWarning, match="is damaged: lost sigma of"):
        rows = study.rows
    assert len(rows) == len(place[1]) - 1 and set(rows) < set(place[1])


def test_the_doctor_lists_what_is_lost_and_writes_a_copy_beside(place, capsys):
    before = (place[0] / FILE).read_bytes()
    assert main(["doctor", str(place[0])]) == 3
    assert "lost: sigma of " in capsys.readouterr().out
    assert main(["doctor", str(place[0]), "--repair"]) == 3
    assert (place[0] / FILE).read_bytes() == before
    copy = place[0].with_name("s.repaired")
    assert str(copy) in capsys.readouterr().out
    study = Study.open(copy)
    assert len(study.rows) == len(place[1]) - 1 and set(study.rows) < set(place[1])
    assert study.info.about.model == "fake/model" and study.commands == ["lipscope measure"]
    assert study.unfinished == "8 of 9 jobs are done"
    assert main(["doctor", str(copy)]) == 0
    # Never over what is there already.
    assert main(["doctor", str(place[0]), "--repair"]) == 2
    assert "holds a study" in capsys.readouterr().err


def test_the_doctor_repairs_only_a_study(tmp_path, capsys):
    assert main(["doctor", "--repair"]) == 2
    assert main(["doctor", str(tmp_path / "nothing"), "--repair"]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.wide
def test_no_damage_is_silent(capsys):
    """A few places of the campaign `python -m tests.study.damage`."""
    found = Counter(said for _, said in campaign(every=4099, ways=("bit", "cut")))
    assert found["told, rest true"] > 5 and not any(found[bad] for bad in BAD)


@pytest.mark.slow
def test_no_damage_is_silent_anywhere():
    found = Counter(said for _, said in campaign(every=64))
    assert found["told, rest true"] > 1000 and not any(found[bad] for bad in BAD)
