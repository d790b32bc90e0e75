"""Wherever the Krylov vectors are kept, the number is the same, and its residual is that of the
vectors returned.
"""

import pytest
import torch

import lipscope as ls
from lipscope.linalg import golub_kahan as storage
from lipscope.linalg.golub_kahan import Basis, GolubKahan, memory_of
from lipscope.linalg.operator import dense_operator
from tests.cases import KINDS, problem

ELSEWHERE = ["bfloat16", "host"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spectrum(*values: float, copies: int = 30) -> torch.Tensor:
    """A matrix with these singular values, and a tail of small ones."""
    s = torch.cat([torch.tensor(values), torch.linspace(0.1, 0, copies)]).double()
    left, right = (torch.linalg.qr(random(len(s), len(s), seed=i))[0] for i in (1, 2))
    return left @ torch.diag(s) @ right


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 5), (5, 1), (2, 2), (7, 3), (60, 40), (40, 60), (150, 150)]
)
def test_against_svd(kind, shape):
    M = random(5, *shape)
    exact = torch.linalg.matrix_norm(M, 2)
    e = ls.spectral_norm(dense_operator(M), tol=1e-7, solver=ls.Solver(seed=0, basis=kind))
    assert ((e.value - exact).abs() <= 1e-11 * exact).all() and all(s.ok for s in e.status)
    left, right = e.left[..., None], e.right[..., None]
    rest = (M.mT @ left - e.value[:, None, None] * right).norm(dim=(1, 2)) / e.value
    assert (rest <= 1e-7).all() and torch.allclose(rest, e.residual, atol=1e-9)
    assert (e.lower <= exact * (1 + 1e-15)).all() and (exact <= e.upper).all()


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("top", [(1.0, 0.999), (1.0, 1.0, 0.5), (1.0, *[0.99] * 20)])
@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_spectra_that_are_hard_to_tell_apart(kind, top, size):
    e = ls.spectral_norm(
        dense_operator(size * spectrum(*top)), 1e-6, solver=ls.Solver(seed=0, basis=kind)
    )
    assert e.value == pytest.approx(size, rel=1e-9) and e.status.ok and e.steps < 200


def test_the_host_gives_the_same_certificate():
    J = dense_operator(random(80, 70))
    here, there = (
        ls.spectral_norm(J, 1e-9, gap=0.01, solver=ls.Solver(seed=0, basis=b))
        for b in ("native", "host")
    )
    assert there.value == pytest.approx(here.value, rel=1e-14) and there.steps == here.steps
    assert (
        there.upper == pytest.approx(here.upper, rel=1e-12) and there.confidence == here.confidence
    )


def test_rounded_vectors_prove_no_upper_bound():
    e = ls.spectral_norm(dense_operator(random(30, 30)), solver=ls.Solver(basis="bfloat16"))
    assert e.upper == float("inf") and e.confidence == 0 and "digits" in e.note


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("memory", [1, 400 * 8 * 8])
def test_small_memory(kind, memory):
    M = spectrum(1.0, 0.9, 0.8, copies=200)
    e = ls.spectral_norm(
        dense_operator(M), 1e-7, solver=ls.Solver(seed=0, memory=memory, basis=kind)
    )
    assert e.value == pytest.approx(1.0, rel=1e-12) and e.status is ls.Status.CONVERGED


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_members_that_leave_early_and_members_that_are_not_numbers(kind):
    M = random(6, 50, 50)
    M[:3] = spectrum(1.0, 0.1, copies=48)
    M[5, 0, 0] = torch.nan
    e = ls.spectral_norm(dense_operator(M), 1e-8, solver=ls.Solver(seed=0, basis=kind))
    assert e.status[5] is ls.Status.NON_FINITE and e.value[5].isnan()
    assert torch.allclose(e.value[:5], torch.linalg.matrix_norm(M[:5], 2), rtol=1e-11)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_steps_that_run_out(kind):
    e = ls.spectral_norm(
        dense_operator(random(200, 200)), 1e-12, solver=ls.Solver(seed=0, max_steps=7, basis=kind)
    )
    exact = torch.linalg.matrix_norm(random(200, 200), 2).item()
    assert e.status is ls.Status.MAX_STEPS and e.steps == 7 and 0.5 * exact < e.value <= exact
    assert (e.upper == float("inf")) == (kind == "bfloat16")


@pytest.mark.parametrize(
    "name", [name for name in KINDS if "huge" not in name and "tiny" not in name]
)
def test_every_kind_of_attention(name):
    for seed in range(2):
        f, X = problem(name, seed)
        exact = ls.local_lipschitz(f, X, tol=1e-10).value
        for kind in ELSEWHERE:
            e = ls.local_lipschitz(f, X, tol=1e-8, solver=ls.Solver(seed=1, basis=kind))
            assert e.value == pytest.approx(exact, rel=1e-8) and e.status.ok, (
                f"{name} {kind} {seed}"
            )


def test_two_bytes_a_number_except_the_first_vector(monkeypatch):
    J = dense_operator(random(2, 40, 30).float())
    run = GolubKahan(J, random(2, 30).float(), "bfloat16")
    for _ in range(6):
        run.step()
    assert [block.dtype for block in run.V.blocks] == [torch.float32, torch.bfloat16]
    one = run.V.combine(torch.eye(6)[None, :1].expand(2, 1, 6).double())[0]
    assert torch.equal(one, run.V.blocks[0][0]) and one.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_blocks_do_what_one_tensor_does(rows, monkeypatch):
    monkeypatch.setattr(storage, "BLOCK", rows * 2 * 25 * 8)
    vectors, w = torch.linalg.qr(random(2, 25, 7))[0].permute(2, 0, 1), random(2, 25, seed=3)
    one, many = Basis(w, "native", 8), Basis(w, "host", 8)
    for k, x in enumerate(vectors):
        one.put(k, x)
        many.put(k, x)
    many.put(2, vectors[2])
    assert [len(block) for block in many.blocks][:-1] == [rows] * (len(many.blocks) - 1)
    for a, b in zip(one.without(w, 5), many.without(w, 5), strict=True):
        assert torch.allclose(a, b, atol=1e-14)
    mix = random(2, 3, 6)
    assert torch.allclose(one.combine(mix), many.combine(mix), atol=1e-14)
    one.keep(torch.tensor([1]))
    many.keep(torch.tensor([1]))
    assert torch.allclose(one.combine(mix[1:]), many.combine(mix[1:]), atol=1e-14)


def test_the_memory_of_the_host_is_known():
    assert memory_of(torch.device("cpu")) > 1 << 28


def test_a_gap_needs_all_digits():
    with pytest.raises(ls.UserError, match="basis='bfloat16' does not give"):
        ls.spectral_norm(dense_operator(random(8, 8)), gap=0.1, solver=ls.Solver(basis="bfloat16"))
