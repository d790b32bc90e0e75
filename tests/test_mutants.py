"""Every planted bug still fits the source, and random ones are what they say."""

import ast

import pytest

from tests.mutants import (
    PACKAGES,
    ROOT,
    Choice,
    Mutant,
    drawn,
    equivalents,
    mutants,
    planted,
)
from tests.mutation.coverage_map import Covering, Place, instrumented, statements
from tests.mutation.edits import edits

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


SOURCE = '''\
"""Docs with 3 < 4 and True."""
from typing import TYPE_CHECKING

__all__ = [1]
if TYPE_CHECKING:
    SIZE = 5
LIMIT = 2.5


def f(x: "3 + 4", dim=-1) -> 7:
    """More than 5 of them."""
    if not x and dim != 0:
        raise ValueError(f"{x + 1} is more than", 3 + 4)
    print("so many", 8)
    return max(
        x * 2,  # not * 3
        dim,
    )
'''


def test_edits_change_what_runs_and_nothing_else():
    found = {(edit.line, edit.new.strip(), edit.names) for edit in edits(SOURCE)}
    assert found == {
        (7, "LIMIT = 5.0", frozenset({"LIMIT"})),
        (10, 'def f(x: "3 + 4", dim=-2) -> 7:', frozenset({"f"})),
        (12, "if x and dim != 0:", frozenset()),
        (12, "if not x or dim != 0:", frozenset()),
        (12, "if not x and dim == 0:", frozenset()),
        (12, "if not x and dim != 1:", frozenset()),
        (15, "return min(", frozenset()),
        (16, "x / 2,  # not * 3", frozenset()),
        (16, "x * 3,  # not * 3", frozenset()),
    }


def test_random_mutants_are_those_of_their_seed_and_can_be_imported():
    chosen = drawn(60, 5, PACKAGES)
    assert chosen == drawn(60, 5, PACKAGES) != drawn(60, 6, PACKAGES)
    assert len({mutant.bug.split("/")[1] for mutant, _ in chosen}) == len(PACKAGES)
    for mutant, edit in chosen:
        changed, source = planted(mutant, ROOT), (ROOT / mutant.file).read_text()
        ast.parse(changed)
        lines = zip(changed.splitlines(), source.splitlines(), strict=True)
        assert [k for k, (new, old) in enumerate(lines, 1) if new != old] == [edit.line]


def test_instrumented_source_does_the_same_and_says_what_it_executed():
    source = SOURCE.replace("x * 2,", "x * 2, 100 if dim else 1,")
    lines = {statement.lineno for statement in statements(source)}
    marked = instrumented(source, {line: line for line in lines})
    executed: dict[int, int] = {}
    marked = marked.replace("from lipscope._recorder import executed as _executed", "")
    names = {"_executed": executed, "TYPE_CHECKING": False}
    exec(compile(marked, "marked", "exec"), names)
    assert set(executed) == {2, 4, 5, 7, 10}
    executed.clear()
    assert names["f"](3, 0) == 6 and set(executed) == {12, 14, 15}
    executed.clear()
    with pytest.raises(ValueError, match="1 is more than"):
        names["f"](0, 1)
    assert set(executed) == {12, 13}


def test_the_tests_of_a_mutant_are_those_that_execute_it_the_nearest_first():
    mutant, edit = next(
        (mutant, edit)
        for mutant, edit in drawn(500, 1, PACKAGES)
        if mutant.file.startswith("lipscope/linalg/") and not edit.names
    )
    here = frozenset({Place(mutant.file, edit.statement)})
    own = f"tests/linalg/test_{mutant.file.split('/')[-1]}::test"
    tests = [
        Covering("tests/study/test_run.py::quick", 0.1, here),
        Covering("tests/linalg/test_x.py::slow", 3.0, here),
        Covering("tests/linalg/test_x.py::quick", 1.0, here),
        Covering("tests/linalg/test_x.py::elsewhere", 0.0, frozenset()),
        Covering(own, 2.0, here),
        Covering("tests/linalg/test_x.py::too_slow", 50.0, here),
    ]
    chosen = Choice(tests, PACKAGES).of(mutant, edit, 20.0)
    assert [tests.index(test) for test in chosen] == [4, 2, 1, 0]


@pytest.mark.parametrize("entry", equivalents(), ids=lambda entry: f"{entry.file}: {entry.new}")
def test_an_edit_that_changes_nothing_is_still_an_edit_of_the_source(entry):
    found = edits((ROOT / entry.file).read_text())
    assert (entry.old, entry.new) in {
        (" ".join(edit.old.split()), " ".join(edit.new.split())) for edit in found
    }
    assert entry.reason
