"""Every planted bug still fits the source."""

import ast

import pytest

from tests.mutants import (
    ROOT,
    mutants,
    planted,
)

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
