"""Numbers keep their digits, exponents their sign, and tokens their words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipscope.report.formats import (
    counted,
    digits,
    exponent,
    interval,
    layer_name,
    power,
    shown_token,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18.0, "18.0"),
        (18.26, "18.3"),
        (9.996, "10.0"),
        (99.95, "100"),
        (0.0248, "0.0248"),
        (0, "0"),
        (1234.4, "1234"),
        (0.00009996, "0.000100"),
        (1.5e7, "1.50 × 10⁷"),
        (-2.5e-9, "-2.50 × 10⁻⁹"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_digits(value, text):
    assert digits(value) == text


@given(st.floats(1e-4, 1e5), st.integers(2, 6))
def test_digits_are_those_of_the_number(value, count):
    text = digits(value, count)
    assert float(text) == pytest.approx(value, rel=0.51 * 10 ** (1 - count))
    shown = text.replace(".", "").lstrip("0")
    assert len(shown) == max(count, len(text.split(".")[0].lstrip("0")))


def test_exponents_and_powers():
    assert (exponent(-0.001), exponent(0.335), exponent(-0.1)) == ("0.00", "0.34", "-0.10")
    assert (power(0.33), power(-0.004)) == ("n⁰·³³", "n⁰·⁰⁰")
    assert (power(-0.25), power(0.5, 1)) == ("n⁻⁰·²⁵", "n⁰·⁵")


def test_small_words():
    assert counted(1, "row") == "1 row" and counted(1404, "row") == "1,404 rows"
    assert interval(1, math.inf) == "[1.00, ∞]"
    assert (layer_name(3), layer_name(None)) == ("layer 3", "model")


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("##hog", "…hog"),
        ("##", "##"),
        ("###", "###"),
        ("## a", "## a"),
        ("hog", "hog"),
        ("\u202ex", "\\u202ex"),
    ],
)
def test_tokens(token, text):
    assert shown_token(token) == text
