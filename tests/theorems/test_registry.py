"""Every registered bound against every named case: the test knows no theorem by name."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lipscope._types import Around, Ball, Everywhere, Point, UserError
from lipscope.theorems.registry import NORMS, REGISTRY, bounds, enclosing
from tests.cases import KINDS, problem
from tests.naive import dense_jacobian
from tests.theorems.soundness import Effort, Tally, audit

DOCS = Path(__file__).resolve().parents[2] / "docs"

CAMPAIGN = 12
"""Problems of each kind: together more than 100,000 pairs of bound and input."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_bound_is_sound(kind: str):
    audit(*problem(kind, 0), 0, Tally(0, {}), Effort(random=2, steps=2))


@pytest.mark.slow
def test_every_bound_is_sound_campaign():
    tally = Tally(0, {})
    for kind in KINDS:
        for seed in range(1000, 1000 + CAMPAIGN):
            audit(*problem(kind, seed), seed, tally, Effort(random=20, steps=6))
    print(f"{tally.pairs} pairs; worst ratios:", *sorted(tally.worst.items()), sep="\n")
    assert tally.pairs >= 100_000
    tested = {
        bound.name for bound in REGISTRY if bound.kind == "upper" or bound.domain is not Everywhere
    }
    assert tested <= set(tally.worst)


def test_rows_are_in_one_norm_and_name_their_source():
    f, X = problem("causal", 0)
    for domain in (Point(X), Ball(2.0, len(X)), Around(X, 0.1), Everywhere(len(X))):
        for norm in NORMS:
            for row in bounds(f, domain, norm):
                assert row.norm == norm and row.kind in ("upper", "lower") and row.value >= 0
                assert row.cite and row.where and 0 < row.confidence <= 1


def test_tightness_is_relative_to_a_measured_sigma():
    f, X = problem("gaussian", 0)
    sigma = torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()
    rows = {row.name: row for row in bounds(f, Point(X))}
    assert rows["input-dependent"].tightness(sigma) == pytest.approx(
        rows["input-dependent"].value / sigma
    )
    assert all(row.tightness(sigma) >= 1 - 1e-12 for row in rows.values() if row.kind == "upper")
    assert rows["compact"].tightness(0.0) == math.inf
    with pytest.raises(UserError, match="measured sigma"):
        rows["compact"].tightness(math.nan)


def test_every_theorem_has_a_citation_and_a_number_or_a_section_that_exists():
    keys = {
        "lipscope",
        *re.findall(r"^@\w+\{(\w+),", (DOCS / "references.bib").read_text(), re.MULTILINE),
    }
    for bound in REGISTRY:
        assert bound.cite in keys, bound.name
        number, pages = (
            re.search(r"Theorem \d", bound.where),
            re.findall(r"docs/(\S+\.md)#(\S+)", bound.where),
        )
        assert number or pages, f"{bound.name} has neither a theorem number nor a section"
        assert bound.cite != "lipscope" or pages, (
            f"{bound.name} is new: its proof must have a section"
        )
        for page, section in pages:
            assert section in anchors((DOCS / page).read_text()), (
                f"{bound.name}: {page}#{section} does not exist"
            )


def anchors(page: str) -> set[str]:
    """The names under which a renderer offers the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_two_and_infinity_name_their_norms():
    f, X = problem("L2", 0)
    for number, name in ((2, "2"), (2.0, "2"), (math.inf, "inf")):
        rows = bounds(f, Ball(1.0, len(X)), number)
        assert rows == bounds(f, Ball(1.0, len(X)), name) and {row.norm for row in rows} == {name}
    for wrong in (1, True, "1", -math.inf):
        with pytest.raises(UserError, match="norm must be '2' or 'inf' or"):
            bounds(f, Ball(1.0, len(X)), wrong)


def test_every_theorem_is_offered_or_refused_in_its_norm():
    f, X = problem("L2", 0)
    for norm in NORMS:
        rows = bounds(f, Ball(1.0, len(X)), norm)
        named = {row.name for row in rows} | {refusal.name for refusal in rows.not_offered}
        assert named == {
            bound.name
            for bound in REGISTRY
            if bound.norm == norm
            and (
                bound.domain in (Ball, (Ball, Everywhere))
                or (bound.domain is Everywhere and bound.kind == "upper")
            )
        }


def test_a_theorem_about_two_kinds_of_sets_is_asked_about_the_smaller():
    X = torch.ones(3, 2)
    both = (Ball, Everywhere)
    assert enclosing(Ball(2.0, 3), both, "upper") == Ball(2.0, 3)
    assert enclosing(Everywhere(3), both, "upper") == Everywhere(3)
    for domain, radius in ((Point(X), 0.0), (Around(X, 0.5), 0.5)):
        ball = enclosing(domain, both, "upper")
        assert isinstance(ball, Ball) and math.sqrt(2) + radius <= ball.R <= (
            math.sqrt(2) + radius
        ) * (1 + 1e-14)
    assert enclosing(Point(X), both, "lower") is None


def test_the_masked_rows_cite_the_theorem_with_the_mask():
    """Theorem 1 is about attention without a mask; with a causal one it is Theorem 2."""
    quoted = [b for b in REGISTRY if b.cite == "castin2024" and b.domain is Ball]
    assert {bound.kind for bound in quoted} == {"upper", "lower"}
    for bound in quoted:
        assert re.search(r"Theorem 1, under a causal mask Theorem 2 \(slides", bound.where)


def test_an_upper_bound_on_a_ball_is_offered_at_a_point_and_a_lower_one_is_not():
    f, X = problem("gaussian", 0)
    at_point = {row.name: row for row in bounds(f, Point(X))}
    on_ball = {row.name: row for row in bounds(f, Ball(X.norm(dim=1).max().item(), len(X)))}
    assert at_point["compact"].value == pytest.approx(on_ball["compact"].value, rel=1e-12)
    assert "tuned gap" in on_ball and "tuned gap" not in at_point


def test_values_do_not_depend_on_the_dtype_of_the_weights():
    f, X = problem("biases", 0)
    single = f.to(torch.float32)
    rows = bounds(single, Point(X.float()))
    again = bounds(single.double(), Point(X.float().double()))
    assert [row.value for row in rows] == [row.value for row in again]


def test_what_overflows_bounds_nothing():
    f, X = problem("gaussian", 0)
    huge = replace(f, Q=1e200 * f.Q, K=1e200 * f.K)
    for row in bounds(huge, Around(X, 0.1)):
        assert row.kind == "lower" or row.value == math.inf


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda X: Ball(0.0, 3), "R > 0"),
        (lambda X: Ball(-1.0, 3), "R=-1.0"),
        (lambda X: Ball(math.inf, 3), "finite"),
        (lambda X: Ball(1.0, 0), "n >= 1"),
        (lambda X: Around(X, 0.0), "r > 0"),
        (lambda X: Around(X, math.nan), "r=nan"),
        (lambda X: Point(X[None]), r"\[n, d\]"),
        (lambda X: Point(X * math.nan), "finite"),
        (lambda X: Everywhere(0), "n >= 1"),
    ],
)
def test_a_bad_domain_is_refused(make, word):
    with pytest.raises(UserError, match=word):
        make(torch.ones(3, 2))


def test_a_domain_the_layer_does_not_fit_is_refused():
    f, X = problem("boolean mask", 0)
    with pytest.raises(UserError, match="mask has shape"):
        bounds(f, Ball(1.0, len(X) + 1))
    with pytest.raises(UserError, match="tokens of size"):
        bounds(f, Point(torch.ones(len(X), X.shape[1] + 1)))
    with pytest.raises(UserError, match="'W2'"):
        bounds(f, Point(X), norm="1")
