"""A study with a gap: every certificate reaches it or says why; it never mixes with another."""

import json
import math
from dataclasses import replace

import pytest
import torch

from lipscope._types import UserError
from lipscope.linalg.certificate import NOISE
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.local import local_lipschitz
from lipscope.models.loading import load
from lipscope.study.run import measure
from lipscope.study.salvage import INFO
from lipscope.study.store import Store
from lipscope.study.study import Study
from tests.study.fakes import info, row, sensitivity
from tests.study.printed import exported, shown


def on_one_line(study: Study) -> str:
    return " ".join(shown(study).split())


def width(study: Study) -> float:
    return max(row.upper / row.lower for row in study.sigma) - 1


@pytest.mark.wide
def test_every_certificate_is_closed_around_the_truth(model, prose):
    asked = {"lengths": (1, 16), "samples": 2}
    free, closed = (measure(model, prose, **asked, gap=gap) for gap in (math.inf, 0.01))
    assert width(free) > 0.01 >= width(closed) and not any(row.missed for row in closed.rows)
    assert " % apart." in on_one_line(closed) and "gap" not in on_one_line(closed)
    for found in closed.rows:
        ids = torch.tensor(model.encode(" ".join(t.token for t in closed.tokens_of(found))))
        heads = None if found.head is None else [found.head]
        (site,) = model.sites(ids, scopes=[found.scope], layers=[found.layer], heads=heads)
        truth = torch.linalg.matrix_norm(jacobian(site.f, site.X).to_dense()[0], 2).item()
        assert (
            found.lower <= truth * (1 + 1e-13)
            and truth <= found.upper
            and found.upper - truth <= 0.01 * truth
        )


def test_a_gap_that_rounding_hides_is_told_in_its_row_and_table(model, prose, tmp_path):
    study = measure(model, prose, (16,), 1, scopes=("attention",), gap=1e-9, out=tmp_path / "s")
    assert {row.status for row in study.rows} <= {"converged", "breakdown"}
    assert {row.reason for row in study.rows} == {NOISE}
    assert len(study.sigma) == 2 and not study.failed and study.sigma[0].missed == NOISE
    assert (
        f"2 of 2 rows miss the gap of 1e-09; the first reason: converged: {NOISE}."
        in on_one_line(study)
    )
    assert width(study) < 1e-3  # as near as rounding allows, not as far as it was when it gave up
    again = []
    measure(
        model, prose, (16,), 1, scopes=("attention",), gap=1e-9, out=tmp_path / "s",
        progress=lambda done, total: again.append(total),
    )  # fmt: skip
    assert again == [0]


@pytest.mark.parametrize(
    ("kept", "asked", "told"),
    [
        (None, 0.01, "gap = 0.1, and this run has 0.01"),
        (0.01, None, "gap = 0.01, and this run has 0.1"),
        (0.01, math.inf, "gap = 0.01, and this run has None"),
        (0.01, 0.02, "gap = 0.01, and this run has 0.02"),
    ],
)
def test_another_gap_is_another_study(model, prose, tmp_path, kept, asked, told):
    before = exported(measure(model, prose, (4,), 1, gap=kept, out=tmp_path / "s"))
    with pytest.raises(UserError, match=told):
        measure(model, prose, (4,), 1, gap=asked, out=tmp_path / "s")
    assert exported(Study.open(tmp_path / "s")) == before


def test_a_study_from_before_there_were_gaps_is_read_and_resumed(model, prose, tmp_path):
    measure(model, prose, (4,), 1, gap=math.inf, out=tmp_path / "s")
    store = Store.create(tmp_path / "s", Study.open(tmp_path / "s").info)
    identity = json.loads(store.get(INFO, "identity"))
    assert identity.pop("gap") is None
    store.put(INFO, "identity", json.dumps(identity))
    store.close()
    assert Study.open(tmp_path / "s").info.identity.gap is None
    grown = measure(model, prose, (4, 6), 1, gap=math.inf, out=tmp_path / "s")
    assert {row.n for row in grown.rows} == {4, 6} and "--gap inf" in grown.info.about.command
    with pytest.raises(UserError, match="gap = None, and this run has"):
        measure(model, prose, (4,), 1, gap=0.5, out=tmp_path / "s")


@pytest.mark.wide
def test_ten_per_cent_by_default_where_there_are_upper_bounds(model, tiny, prose):
    asked = {"lengths": (8, 24), "samples": 2}
    closed, free = measure(model, prose, **asked), measure(model, prose, **asked, gap=math.inf)
    assert closed.info.identity.gap == 0.1 >= width(closed) and free.info.identity.gap is None
    assert width(free) > width(closed) and not any(row.missed for row in closed.rows)
    assert "% apart" in on_one_line(closed)
    single = measure(load(tiny, dtype="float32"), prose, **asked)
    assert single.info.identity.gap is None and "--gap" not in single.info.about.command


def test_every_row_has_a_failure_probability_of_its_own(model, prose, monkeypatch):
    """Members of a batch share what their solver may fail with: it is theirs added up."""
    seen = []

    def recording(f, X, tol, *, gap, solver):
        solved = local_lipschitz(f, X, tol, gap=gap, solver=solver)
        seen.append((solver.failure, len(solved)))
        return solved

    monkeypatch.setattr("lipscope.study.probe.solve", recording)
    study = measure(model, prose, (8,), 3)
    assert sum(count for _, count in seen) == len(study.sigma) and max(seen)[1] > 3
    assert all(failure == pytest.approx(count * 1e-9) for failure, count in seen)
    assert study.joint_failure == pytest.approx(len(study.sigma) * 1e-9)


@pytest.mark.parametrize("gap", [0.0, -0.1, 1.0, 1.01, math.nan])
def test_what_a_gap_is(model, prose, tmp_path, gap):
    with pytest.raises(
        UserError, match="gap, the relative distance upper / lower - 1, must lie"
    ) as told:
        measure(model, prose, (4,), 1, gap=gap, out=tmp_path / "s")
    assert ("for upper / lower <= 1.01 give 0.01" in str(told.value)) is (gap == 1.01)
    assert not (tmp_path / "s").exists()


def test_a_gap_needs_an_upper_bound(tiny, prose, tmp_path):
    with pytest.raises(
        UserError, match=r"float32 gives no upper bound; measure in float64 \(--dtype float64\)"
    ):
        measure(load(tiny, dtype="float32"), prose, (4,), 1, gap=0.01, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("identity", "upper", "told"),
    [
        (
            {"dtype": "float32"},
            (math.inf, math.inf),
            "Every σ has a lower bound but no upper bound; an upper bound needs --dtype",
        ),
        (
            {},
            (2.2, math.inf),
            "10 % apart; 1 has no upper bound; --gap iterates until there is one.",
        ),
        (
            {"gap": 0.1},
            (2.2, math.inf),
            "at most 10 % apart; 1 has no upper bound. The upper bound holds",
        ),
        (
            {},
            (2.2, 2.4),
            "Every σ lies between its lower and upper bound, at most 20 % apart. All 2",
        ),
    ],
)
def test_the_table_says_what_is_bounded(identity, upper, told):
    store, rows = (
        Store.create(None, info(**identity)),
        [row(sample=i, upper=x) for i, x in enumerate(upper)],
    )
    store.write(rows, map(sensitivity, rows))
    assert told in on_one_line(Study(store))


@pytest.mark.parametrize(
    ("certified", "failure", "says"),
    [
        (0, 1.0, None),
        (1, 1e-9, "The upper bound holds with probability at least 1 - 1e-09."),
        (3, 3e-9, "All 3 upper bounds hold together with probability at least 1 - 3e-09."),
        (141, 1.41e-7, "All 141 upper bounds hold together with probability at least 1 - 1.5e-07."),
    ],
)
def test_a_study_says_with_what_probability_all_its_upper_bounds_hold(certified, failure, says):
    store = Store.create(None, info())
    rows = [row(sample=i) for i in range(certified)]
    rows += [row(sample=200, upper=math.inf)]
    # Theorems and evaluated numbers hold without a probability; a failed row claims nothing.
    rows += [row(probe="bound: compact", kind="upper", upper=2.0, lower=0.0)]
    rows += [
        row(probe="attack: direction, step 1", kind="ratio"),
        row(probe="regime", kind="log length"),
    ]
    rows += [row(sample=201, value=math.nan, lower=0.0, upper=math.inf, status="failed")]
    store.write(rows, [sensitivity(r) for r in rows if r.probe == "sigma" and not r.failing])
    study = Study(store)
    assert study.joint_failure == failure and study.joint_confidence == 1 - failure
    assert (says in on_one_line(study)) if says else ("probability" not in on_one_line(study))


def test_what_a_search_certifies_counts_in_a_study_of_any_dtype():
    kept = info(dtype="float32")
    store = Store.create(None, replace(kept, about=replace(kept.about, confidence=0.0)))
    store.write([row(upper=math.inf), row(probe="worst found"), row(probe="worst found", sample=1)])
    assert Study(store).joint_failure == 2e-9


def test_rows_that_rounding_drowns_are_counted():
    store = Store.create(None, info())
    rows = [row(), row(sample=1, lower=0.0, status="imprecise"), row(sample=2, upper=math.inf)]
    store.write(rows, map(sensitivity, rows))
    said = on_one_line(Study(store))
    assert "at most 1 % apart; 1 has no upper bound; --gap iterates until there is one" in said
    assert "; 1 has no lower bound above 0, because rounding may exceed them." in said
    assert "1 of 3 rows are imprecise: rounding may exceed 1 % of σ." in said
