"""Every claim is there, quoted with its source, and can be chosen by name, range or paper."""

import json

import pytest

from lipscope import UserError
from lipscope.cli import main
from lipscope.papers.claims import PAPERS, QUOTED
from lipscope.papers.running import chosen, claims

IDS = [
    *(f"C{i}" for i in range(1, 35)),
    *(f"S{i}" for i in range(1, 12)),
    *(f"V{i}" for i in range(1, 9)),
    *(f"N{i}" for i in range(1, 4)),
    *(f"K{i}" for i in range(1, 11)),
    "A1",
]


def test_all_67_claims_are_registered_once_with_their_source():
    found = claims()
    assert [claim.id for claim in found] == IDS and len(IDS) == 67
    assert set(QUOTED) == set(IDS)
    for claim in found:
        assert claim.paper in PAPERS and claim.says and claim.needs
        assert QUOTED[claim.id].source


def test_claims_are_chosen_by_name_range_and_paper():
    assert [c.id for c in chosen(None, ["C3", "S1-S3"])] == ["C3", "S1", "S2", "S3"]
    assert {c.paper for c in chosen("kim2021")} == {"kim2021"}
    assert len(chosen("castin2024")) == 56
    with pytest.raises(UserError, match=r"there is no claim 'C35'.*--list"):
        chosen(None, ["C35"])
    with pytest.raises(UserError, match="there is no claim 'K1' of castin2024"):
        chosen("castin2024", ["K1"])
    with pytest.raises(UserError, match="there is no paper 'smith2020'"):
        chosen("smith2020")


def test_the_command_lists_claims_as_lines_and_as_json(capsys):
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == IDS
    assert main(["reproduce", "kim2021", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0].keys() == {"id", "paper", "says", "needs"} and found[0]["id"] == "K1"
