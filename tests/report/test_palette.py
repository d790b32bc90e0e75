"""Colours that every eye tells apart, on light and on dark paper."""

import itertools
import math

import pytest

from lipscope.report.palette import (
    LEVELS,
    MARKER_TEXTS,
    MARKERS,
    SERIES_DARK,
    SERIES_LIGHT,
    colours,
    contrast,
    css,
    distinct,
    level,
    series,
    text_on,
)

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
               (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
               (0.004733, 0.691367, 0.303900)),
}  # fmt: skip
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def product(matrix, vector):
    return [math.fsum(a * x for a, x in zip(row, vector, strict=True)) for row in matrix]


def lab(text, eye):
    """CIELAB under D65 of a colour as an eye sees it."""
    channels = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [min(max(c, 0.0), 1.0) for c in product(EYES[eye], linear)]
    x, y, z = (
        v / white for v, white in zip(product(TO_XYZ, seen), (0.9505, 1.0, 1.089), strict=True)
    )
    fx, fy, fz = (math.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_the_distance_is_that_of_cielab():
    assert math.dist(lab("#ffffff", "normal"), lab("#000000", "normal")) == pytest.approx(100, 1e-3)
    red = lab("#ff0000", "normal")  # the textbook value
    assert red == pytest.approx((53.24, 80.09, 67.20), abs=0.1)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("found", [SERIES_LIGHT, SERIES_DARK], ids=["light", "dark"])
def test_every_pair_of_series_differs(eye, found):
    least = min(math.dist(lab(a, eye), lab(b, eye)) for a, b in itertools.combinations(found, 2))
    assert least > 23


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast(dark):
    found = colours(dark)
    for paper in (found["paper"], found["panel"]):
        for name in ("ink", "muted", "accent", *(f"s{i}" for i in range(len(SERIES_LIGHT)))):
            assert contrast(found[name], paper) >= 4.5, name
    for ramp in "cv":
        for i in range(LEVELS):
            assert contrast(text_on(found[f"{ramp}{i}"]), found[f"{ramp}{i}"]) >= 4.5


def test_contrast_is_that_of_the_guidelines():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("dark", [False, True])
def test_ramps_move_away_from_the_paper(dark):
    found = colours(dark)
    light = [lab(found[f"c{i}"], "normal")[0] for i in range(LEVELS)]
    assert light == sorted(light, reverse=not dark)
    middle = LEVELS // 2
    for i in range(1, middle):
        assert (
            contrast(found[f"v{middle - i}"], found["paper"])
            <= contrast(found[f"v{middle - i - 1}"], found["paper"]) * 1.02
        )


def test_a_colour_of_a_figure_is_one_variable_of_the_page():
    light = colours()
    assert len(set(light.values())) == len(light), "the SVG finds the variable by the colour"
    for name in light:
        assert css().count(f"--{name}:") == 2, name


def test_many_curves_are_coloured_by_depth():
    assert [series(i, 3) for i in range(3)] == ["s0", "s1", "s2"]
    many = [series(i, 40) for i in range(40)]
    assert many == sorted(many) and many[-1] == "c31"
    for dark in (False, True):
        found = colours(dark)
        assert all(contrast(found[name], found["paper"]) > 3 for name in many)


def test_studies_differ_in_colour_or_line():
    assert len({distinct(i) for i in range(21)}) == 21
    assert {name for name, _ in map(distinct, range(7))} == {f"s{i}" for i in range(7)}


def test_levels_and_markers():
    assert [level(x) for x in (-1.0, 0.0, 0.5, 1.0, 2.0)] == [0, 0, 16, 31, 31]
    assert len(MARKERS) == len(MARKER_TEXTS)
