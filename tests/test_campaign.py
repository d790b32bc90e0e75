"""Thousands of random attention problems against float64 dense SVD of an independent Jacobian.

The quick run takes a few of each kind; `make slow` takes 300 of each, more than 10,000 in all.
"""

from __future__ import annotations

import pytest
import torch

import lipscope as ls
from tests.cases import KINDS, problem
from tests.naive import dense_jacobian

MISS = 1e-8
TOL = 1e-10
"""A residual of 1e-8 may stop inside a cluster of singular values 4e-8 wide (L2, causal, 302)."""


def check(kind: str, seed: int) -> None:
    f, X = problem(kind, seed)
    exact = torch.linalg.matrix_norm(dense_jacobian(f, X), 2).item()
    e = ls.local_lipschitz(f, X, tol=TOL)
    assert e.status.ok, f"{kind} {seed}: {e}"
    assert abs(e.value - exact) <= MISS * exact, f"{kind} {seed}: {e.value} against {exact}"
    # The dense Jacobian is computed in float64 too, and has an error of its own of the stated size.
    slack = float(ls.jacobian(f, X).stated_rounding) * exact
    assert e.lower <= exact + slack and exact - slack <= e.upper, (
        f"{kind} {seed}: {exact} not in {e}"
    )


def test_there_are_enough_kinds():
    assert len(KINDS) >= 20
    assert 300 * len(KINDS) >= 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_of_each(kind: str):
    for seed in range(4):
        check(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_campaign(kind: str):
    for seed in range(300):
        check(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_campaign_batched(kind: str):
    """The same layers on batches, heads together and apart: every member as if it were alone."""
    for seed in range(300, 320):
        f, X = problem(kind, seed)
        batch = torch.stack([X, X.flip(0), 0.5 * X])
        exact = torch.stack([torch.linalg.matrix_norm(dense_jacobian(f, x), 2) for x in batch])
        e = ls.local_lipschitz(f, batch, tol=TOL)
        assert ((e.value - exact).abs() <= MISS * exact).all(), f"{kind} {seed}"
        apart = ls.local_lipschitz(f.heads_apart(), batch, tol=TOL).value.reshape(3, f.heads)
        for h in range(f.heads):
            alone = torch.stack(
                [torch.linalg.matrix_norm(dense_jacobian(f.head(h), x), 2) for x in batch]
            )
            assert ((apart[:, h] - alone).abs() <= MISS * alone).all(), f"{kind} {seed} head {h}"
