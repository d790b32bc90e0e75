"""Arguments of the wrong type: one sentence that names them, and no cost where all is well."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lipscope as ls
from lipscope._checks import abbreviate, check_whole, name_bad_argument
from lipscope._files import for_spreadsheet, for_terminal

W, X = torch.eye(3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
F = ls.SelfAttention(W, W, W)
HUGE = 10**5000  # Python refuses to print it


LAYER = [
    ({"mask": 0}, "mask must be a Tensor or None, got 0"),
    ({"padding": 1.5}, "padding must be a Tensor or None, got 1.5"),
    ({"biases": True}, "biases must be three, (bq, bk, bv), got True"),
    ({"biases": (0, None, None)}, "bq must be a tensor or None, got 0"),
    ({"kernel": None}, "kernel must be Dot(...) or L2(...), got None"),
    ({"heads": "3"}, "heads must be an integer, got '3'"),
    ({"heads": True}, "heads must be an integer, got True"),
    ({"window": True}, "window must be an integer or None, got True"),
    ({"window": HUGE}, "window must be an integer or None, got an integer of more than 64 bits"),
]
SOLVER = [
    ({"max_steps": 1.5}, "max_steps must be an integer, got 1.5"),
    ({"max_steps": 10**9}, "max_steps must be a whole number from 1 to 1000000, got 1000000000"),
    ({"seed": "3"}, "seed must be an integer or None, got '3'"),
    ({"failure": None}, "failure must be a number, got None"),
]
CALL = [
    ({"tol": None}, "tol must be a number, got None"),
    ({"tol": [1e-6]}, "tol must be a number, got [1e-06]"),
    ({"tol": torch.ones(2)}, "tol must be a number, got a tensor of shape (2,)"),
]


def compare_messages() -> None:
    """Every case above; for an interpreter without the shape checks that only tests have."""
    for make, cases in (
        (lambda **options: ls.SelfAttention(W, W, W, **options), LAYER),
        (lambda **options: ls.local_lipschitz(F, X, solver=ls.Solver(**options)), SOLVER),
        (lambda **options: ls.local_lipschitz(F, X, **options), CALL),
    ):
        for options, words in cases:
            try:
                make(**options)
            except ls.UserError as error:
                assert str(error) == words, str(error)
            else:
                raise AssertionError(f"taken: {words}")


@pytest.mark.wide
def test_the_wrong_argument_is_named():
    root = Path(__file__).resolve().parents[1]
    code = "from tests.test_checks import compare_messages; compare_messages()"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_errors_that_are_not_about_types_are_left_alone():
    @name_bad_argument
    def divide(a: float, b: float = 1.0) -> float:
        return a / b

    assert divide(3, b=2) == 1.5 and divide.__name__ == "divide"
    with pytest.raises(ZeroDivisionError):
        divide(1.0, 0.0)
    with pytest.raises(ls.UserError, match="b must be a number, got '2'") as caught:
        divide(1.0, "2")
    assert isinstance(caught.value.__cause__, TypeError)


def test_memory_that_is_not_there_is_said_so():
    @name_bad_argument
    def ask(n: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    with pytest.raises(ls.UserError, match="not enough memory for this; try smaller sizes"):
        ask(3)


@pytest.mark.parametrize(
    "value", [-1, 11, True, 2.0, "3", None, HUGE], ids=lambda value: type(value).__name__
)
def test_whole_numbers_have_ends(value):
    check_whole("n", 10, 0, 10)
    with pytest.raises(ls.UserError, match="n must be a whole number from 0 to 10, got"):
        check_whole("n", value, 0, 10)


class Wordless:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@given(st.from_type(object) | st.text() | st.integers() | st.floats())
def test_any_value_can_be_shown(value):
    words = abbreviate(value)
    assert "\n" not in words and len(words) <= 80


def test_values_that_cannot_show_themselves_are_shown():
    assert abbreviate(Wordless()) == "a value of type Wordless"
    assert abbreviate(HUGE) == "an integer of more than 64 bits"
    assert abbreviate(torch.zeros(2, 3)) == "a tensor of shape (2, 3)"
    assert abbreviate(math.nan) == "nan" and abbreviate(Path("a")) == "PosixPath('a')"


@given(st.text())
def test_text_for_a_terminal_cannot_drive_it(text):
    found = for_terminal(text)
    assert found.isprintable() or not found
    assert found == text or not text.isprintable()


@given(st.text(), st.integers(1, 50))
def test_text_for_a_terminal_keeps_to_its_width(text, width):
    assert len(for_terminal(text, width)) <= width


@given(st.text())
def test_text_for_a_spreadsheet_is_no_formula(text):
    found = for_spreadsheet(text)
    assert found in (text, "'" + text)
    assert not found.lstrip()[:1] or found.lstrip()[0] not in "=+-@"
