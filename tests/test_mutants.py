"""Every planted bug still fits the source: its text is there exactly once, and so are its tests."""

import ast

import pytest

from tests.mutants import ROOT, Mutant, mutants, planted

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_a_mutant_can_be_planted_and_its_tests_exist(mutant):
    source = planted(mutant, ROOT)
    assert mutant.new != mutant.old
    ast.parse(source)  # a bug that cannot be imported is killed by any test
    assert mutant.tests.split() and all((ROOT / tests).exists() for tests in mutant.tests.split())


def test_no_mutant_is_planted_twice():
    assert (
        len({m.bug for m in MUTANTS})
        == len({(m.file, m.old, m.new) for m in MUTANTS})
        == len(MUTANTS)
    )


@pytest.mark.parametrize("text", ["a text that is not in the source", "import"])
def test_a_text_that_is_gone_or_ambiguous_is_found_out(text):
    with pytest.raises(ValueError, match="times, not once"):
        planted(Mutant("a bug", "lipscope/linalg/spectral.py", text, "", "tests"), ROOT)
