"""The solver: right values, honest statuses, options, wherever Krylov vectors are kept."""

from dataclasses import replace

import pytest
import torch

import lipscope as ls
from lipscope.linalg import golub_kahan, spectral
from lipscope.linalg.golub_kahan import Basis, GolubKahan, memory_of
from lipscope.linalg.operator import Rounding
from tests.cases import KINDS, problem
from tests.checks import dense_operator


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BASES = ["native", "bfloat16", "host"]


def spectrum(*values: float, copies: int = 30) -> torch.Tensor:
    """A matrix with these singular values, and a tail of small ones."""
    s = torch.cat([torch.tensor(values), torch.linspace(0.1, 0, copies)]).double()
    left, right = (torch.linalg.qr(random(len(s), len(s), seed=i))[0] for i in (1, 2))
    return left @ torch.diag(s) @ right


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (2, 2), (7, 3), (60, 40), (40, 60)])
def test_against_svd(shape, basis):
    M = random(6, *shape)
    exact = torch.linalg.matrix_norm(M, 2)
    tol = 1e-9 if basis == "native" else 1e-7
    e = ls.spectral_norm(dense_operator(M), tol=tol, solver=ls.Solver(seed=0, basis=basis))
    assert ((e.value - exact).abs() <= 1e-11 * exact).all()
    assert (e.lower <= exact * (1 + 1e-15)).all() and (exact <= e.upper).all()
    assert all(s.ok for s in e.status)
    left, right = e.left[..., None], e.right[..., None]
    rest = (M.mT @ left - e.value[:, None, None] * right).norm(dim=(1, 2)) / e.value
    assert (rest <= tol).all() and torch.allclose(rest, e.residual, atol=1e-9)


def test_triplet_is_a_singular_triplet():
    M = random(30, 20)
    e = ls.spectral_norm(dense_operator(M), tol=1e-10)
    assert torch.allclose(M @ e.right, e.value * e.left, atol=1e-12)
    assert (M.T @ e.left - e.value * e.right).norm() <= 1e-9 * e.value
    assert abs(e.left.norm() - 1) < 1e-13 and abs(e.right.norm() - 1) < 1e-13


def test_batch_and_single_agree_and_index():
    M = random(4, 15, 15)
    batch = ls.spectral_norm(dense_operator(M), tol=1e-10)
    assert len(batch) == 4
    for i in range(4):
        alone = ls.spectral_norm(dense_operator(M[i]), tol=1e-10)
        assert isinstance(alone.value, float) and isinstance(alone.status, ls.Status)
        assert batch[i].value == pytest.approx(alone.value, rel=1e-12)
        assert isinstance(alone, ls.Estimate) and isinstance(batch, ls.BatchEstimate)
    assert [e.value for e in batch] == batch.value.tolist()


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("memory", [1, 400 * 8 * 8])
def test_small_memory_restarts_and_converges(memory, basis):
    M = spectrum(1.0, 0.9, 0.8, copies=200)
    solver = ls.Solver(seed=0, memory=memory, basis=basis)
    e = ls.spectral_norm(dense_operator(M), tol=1e-7, solver=solver)
    assert e.value == pytest.approx(1.0, rel=1e-12)
    assert e.status is ls.Status.CONVERGED and e.upper >= e.value


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("top", [(1.0, 0.999), (1.0, 1.0, 0.5), (1.0, *[0.99] * 20)])
@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_spectra_that_are_hard_to_tell_apart(basis, top, size):
    J = dense_operator(size * spectrum(*top))
    e = ls.spectral_norm(J, 1e-6, solver=ls.Solver(seed=0, basis=basis))
    assert e.value == pytest.approx(size, rel=1e-9) and e.status.ok and e.steps < 200


@pytest.mark.parametrize("factor", [0.0, 1e-308, 1e-200, 1e200, 1e306])
def test_scale_is_harmless(factor):
    M = factor * random(12, 12)
    e = ls.spectral_norm(dense_operator(M))
    exact = torch.linalg.matrix_norm(random(12, 12), 2).item() * factor
    assert e.value == pytest.approx(exact, rel=1e-7 if factor == 1e-308 else 1e-11)
    # Among the smallest numbers underflow takes digits: nothing is claimed there.
    assert e.status.ok == (factor != 1e-308) and (e.lower > 0) == (factor > 1e-308)
    assert e.lower <= exact <= e.upper


def test_float32_has_no_upper_bound_and_says_so():
    e = ls.spectral_norm(dense_operator(random(30, 30).float()))
    assert e.upper == float("inf") and e.confidence == 0 and "float64" in e.note
    rounded = ls.spectral_norm(dense_operator(random(30, 30)), solver=ls.Solver(basis="bfloat16"))
    assert rounded.upper == float("inf") and rounded.confidence == 0 and "digits" in rounded.note
    assert e.value == pytest.approx(torch.linalg.matrix_norm(random(30, 30), 2).item(), rel=1e-6)


def test_float32_below_its_resolution():
    e = ls.spectral_norm(dense_operator(random(30, 30).float()), tol=1e-9)
    assert e.status is ls.Status.RESOLUTION and e.residual < 1e-5


def test_warm_start_costs_the_certificate():
    M = random(50, 50)
    cold = ls.spectral_norm(dense_operator(M), tol=1e-8)
    warm = ls.spectral_norm(dense_operator(M), tol=1e-8, start=cold.right)
    assert warm.steps < cold.steps and warm.value == pytest.approx(cold.value, rel=1e-13)
    assert warm.upper == float("inf") and warm.confidence == 0 and "start" in warm.note


@pytest.mark.parametrize("basis", BASES)
def test_max_steps_is_reported(basis):
    M = random(200, 200)
    solver = ls.Solver(seed=0, max_steps=7, basis=basis)
    e = ls.spectral_norm(dense_operator(M), tol=1e-12, solver=solver)
    exact = torch.linalg.matrix_norm(M, 2).item()
    assert e.status is ls.Status.MAX_STEPS and e.steps == 7 and 0.5 * exact < e.value <= exact
    assert e.lower <= exact <= e.upper
    assert (e.upper == float("inf")) == (basis == "bfloat16")


@pytest.mark.parametrize("basis", BASES)
def test_members_that_leave_early_and_members_that_are_not_numbers(basis):
    M = random(6, 50, 50)
    M[:3] = spectrum(1.0, 0.1, copies=48)
    M[5, 0, 0] = torch.nan
    e = ls.spectral_norm(dense_operator(M), 1e-8, solver=ls.Solver(seed=0, basis=basis))
    assert e.status[5] is ls.Status.NON_FINITE and e.value[5].isnan()
    assert e.upper[5] == float("inf")
    assert torch.allclose(e.value[:5], torch.linalg.matrix_norm(M[:5], 2), rtol=1e-11)


def test_seed_reproduces_and_no_seed_varies():
    J = dense_operator(random(40, 40))
    first, second = (ls.spectral_norm(J, tol=0.1, solver=ls.Solver(seed=7)) for _ in range(2))
    assert first.value == second.value and torch.equal(first.right, second.right)
    assert ls.spectral_norm(J, tol=0.1).value != ls.spectral_norm(J, tol=0.1).value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tol": 0.0}, "tol must be a positive number"),
        ({"tol": float("nan")}, "tol must be a positive number"),
        ({"gap": 1.0}, "gap, the relative distance upper / lower - 1, must lie between 0 and 1"),
        ({"start": torch.ones(3)}, r"start must have shape \(8,\), got \(3,\)"),
        ({"start": torch.zeros(8)}, "start must be finite and not zero"),
        ({"gap": 0.1, "solver": ls.Solver(basis="bfloat16")}, "basis='bfloat16' does not give"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ls.UserError, match=message):
        ls.spectral_norm(dense_operator(random(8, 8)), **options)
    if "gap" in options:
        with pytest.raises(ls.UserError, match=r"needs float64|between 0 and 1"):
            ls.spectral_norm(dense_operator(random(8, 8).float()), gap=options["gap"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failure": 0.0}, "failure must be a probability"),
        ({"max_steps": 0}, "max_steps must be a whole number from 1 to 1000000, got 0"),
        ({"basis": "disk"}, "basis must be one of 'native', 'bfloat16', 'host', got 'disk'"),
    ],
)
def test_bad_solvers(options, message):
    with pytest.raises(ls.UserError, match=message):
        ls.Solver(**options)


def test_misleading_start_spectrum():
    """A bulk of equal values hides one larger: stopping on small changes would return 0.9."""
    spectrum = torch.cat([torch.ones(1), torch.full((1999,), 0.9)]).double()
    J = dense_operator(torch.diag(spectrum))
    for seed in range(5):
        assert ls.spectral_norm(J, solver=ls.Solver(seed=seed)).value == pytest.approx(1, rel=1e-10)


@pytest.mark.parametrize("noise", [1e-3, 0.3, float("nan")])
def test_a_rough_operator_finds_the_vector_and_never_the_value(noise):
    """The number is that of J, however poor the rough operator; a good one saves exact products."""
    M = random(3, 80, 80).float()
    J = dense_operator(M)
    rough = dense_operator(M + noise * random(3, 80, 80, seed=1).float())
    alone = ls.spectral_norm(J, tol=1e-4, solver=ls.Solver(seed=0))
    calls = 0

    def counted(E: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return J.mv(E)

    e = ls.spectral_norm(
        replace(J, mv=counted, low_precision=rough, take=None), tol=1e-4, solver=ls.Solver(seed=0)
    )
    assert torch.allclose(e.value, alone.value, rtol=1e-6) and all(s.ok for s in e.status)
    assert noise != 1e-3 or calls < alone.steps.max()


def test_a_good_start_costs_one_step(monkeypatch):
    """One product each way: those of the only step are the products of the vectors found."""
    monkeypatch.setattr(spectral, "SMALL", 0)  # look after the first step, as in long problems
    M = random(80, 80).float()
    J, calls = dense_operator(M), {"mv": 0, "rmv": 0}

    def counted(name: str):
        def product(x: torch.Tensor) -> torch.Tensor:
            calls[name] += 1
            return getattr(J, name)(x)

        return product

    truth = ls.spectral_norm(J, tol=1e-6, solver=ls.Solver(seed=0))
    start = truth.right + 1e-4 * random(80, seed=1).float()
    e = ls.spectral_norm(
        replace(J, mv=counted("mv"), rmv=counted("rmv"), take=None), tol=0.1, start=start
    )
    assert e.steps == 1 and calls == {"mv": 1, "rmv": 1}
    assert e.value == pytest.approx((M.double() @ e.right.double()).norm().item(), rel=1e-6)
    assert e.value == pytest.approx(truth.value, rel=1e-4) and e.lower <= truth.value


def test_a_step_in_half_precision_is_evaluated_again(monkeypatch):
    monkeypatch.setattr(spectral, "SMALL", 0)
    J, calls = dense_operator(random(80, 80).bfloat16()), 0

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return J.mv(x)

    start = ls.spectral_norm(J, tol=0.1, solver=ls.Solver(seed=0)).right
    e = ls.spectral_norm(replace(J, mv=counted, take=None), tol=0.1, start=start)
    assert e.steps == 1 and calls == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_given_start_that_misses_the_top_vector_claims_nothing(dtype):
    """diag(1, 2, 0) from e_1 and from e_3: a singular value each, no upper bound, never called
    exact.
    """
    J = dense_operator(torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=dtype)))
    for i, value in ((0, 1.0), (2, 0.0)):
        e = ls.spectral_norm(J, start=torch.eye(3, dtype=dtype)[i])
        assert e.value == pytest.approx(value) and e.upper == float("inf") and e.confidence == 0
        assert e.status is ls.Status.CONVERGED


def test_noise_of_the_adjoint_counts():
    """Products with J' that are off by 1e-7, the same way every time: both bounds know of it."""
    M = torch.diag(torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))
    wrong = M + 1e-7 * torch.tensor(
        [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], dtype=torch.float64
    )
    J = ls.LinearOperator(lambda x: M @ x, lambda u: wrong.T @ u, (3,), (3,))
    e = ls.spectral_norm(J, solver=ls.Solver(seed=0))
    assert e.value - e.lower > 1e-7 and e.upper == float("inf")


@pytest.mark.parametrize(("bits", "status"), [(8, "CONVERGED"), (3, "IMPRECISE")])
def test_rounding_of_a_measured_adjoint_is_seen_in_residual_and_status(bits, status):
    """J is exact, J' keeps few bits, and nothing is stated of either: the residual includes what
    rounding leaves of J' left, and the value, which is that of J alone, stays within its bounds.
    """
    M = random(300, 200).float()
    J, unit = dense_operator(M), 2.0**-bits

    def rounded(u: torch.Tensor) -> torch.Tensor:
        y = J.rmv(u)
        exponent = 2.0 ** y.abs().log2().floor()
        return (y / (unit * exponent)).round() * unit * exponent

    rounding = Rounding(perturbed=lambda i: (J.mv, rounded))
    K = replace(J, rmv=rounded, rounding=rounding, take=None)
    e = ls.spectral_norm(K, tol=1e-3, solver=ls.Solver(seed=0))
    right, left = e.right.double(), e.left.double()
    residual = float((M.double().T @ left - e.value * right).norm() / e.value)
    assert residual > unit / 8 and e.residual > 0.9 * residual
    assert e.lower <= torch.linalg.svdvals(M.double())[0] and e.status.name == status


def test_a_start_is_not_the_numbers_of_its_seed():
    """An input drawn with the solver's own seed must not be the start."""
    drawn = torch.randn(1, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert not torch.equal(
        spectral.random_start(dense_operator(torch.eye(6).double()), 1, 3), drawn
    )


def test_members_that_are_done_take_no_further_products():
    """Seven of rank one are done after two steps; the eighth takes dozens, alone."""
    M = torch.zeros(8, 40, 40, dtype=torch.float64)
    M[:, 0, 0] = 1
    M[7] = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    members = []

    def counted(J):
        def mv(x):
            members.append(len(x))
            return J.mv(x)

        return replace(J, mv=mv, take=lambda some: counted(J.take(some)))

    e = ls.spectral_norm(counted(dense_operator(M)), tol=1e-10)
    assert torch.allclose(e.value, torch.linalg.matrix_norm(M, 2))
    assert len(members) > 20 and members.count(8) < len(members) / 2


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


@pytest.mark.parametrize(
    "name", [name for name in KINDS if "huge" not in name and "tiny" not in name]
)
def test_every_kind_of_attention(name):
    for seed in range(2):
        f, X = problem(name, seed)
        exact = ls.local_lipschitz(f, X, tol=1e-10).value
        for kind in BASES[1:]:
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
    monkeypatch.setattr(golub_kahan, "BLOCK", rows * 2 * 25 * 8)
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
