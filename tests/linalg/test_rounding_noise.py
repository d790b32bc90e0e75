"""Rounding measured by moving every operation: what is moved, and what is named instead."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lipscope as ls
from lipscope.linalg.rounding_noise import DRAWS, WIDENED, RoundingNoise
from tests.campaigns import compiled, edges
from tests.campaigns.runner import Result


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("number", range(len(edges.CLASSES)))
def test_edges(number: int):
    """A few cases of each class of the campaign."""
    result = Result()
    for seed in range(number, 40 * len(edges.CLASSES), 4 * len(edges.CLASSES)):
        edges.CLASSES[number](edges.Draw(seed), result)
    assert result.faults == [] and not result.total()["false"]


@pytest.mark.parametrize("step", edges.EVERY, ids=lambda step: getattr(step, "__name__", "out="))
def test_each_step_moves_by_the_rounding_of_its_largest_number(step):
    """Adding 1e8 loses eight digits of the scores; the spread of the result must show it."""
    s = draw(4, 4)
    still = torch.softmax(step(s * 1.0, 1e8), -1)
    spread = 0.0
    for seed in range(3):
        with torch.no_grad(), RoundingNoise(seed):
            # An operation makes the scores, as they are the map's own.
            y = torch.softmax(step(s * 1.0, 1e8), -1)
        spread = max(spread, (y - still).abs().max().item())
    assert 3e-8 < spread < 2e-6  # complex products move both parts, three times


def test_views_and_constants_stay():
    X = draw(3, 4)
    with torch.no_grad(), RoundingNoise(0):
        assert torch.equal(X.view(12)[4:8], X[1])
        assert torch.equal(torch.ones(3).fill_(0.1), torch.full((3,), 0.1))
        assert not torch.equal(X * 1, X)


def test_numbers_of_the_caller_are_restored():
    kept = draw(4)
    before = kept.clone()
    with torch.no_grad(), RoundingNoise(0):
        kept[1:].mul_(3.0)
        kept.add_(1.0)
    assert torch.equal(kept, before)
    norm = torch.nn.BatchNorm1d(4).double().eval()
    before = norm.running_mean.clone()
    ls.local_lipschitz(norm, draw(3, 4))
    assert torch.equal(norm.running_mean, before)


class Written(nn.Module):
    """Squares of (X + 1e9) - 1e9, by way of a buffer that every call writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 2, dtype=torch.float64))

    def forward(self, X: Tensor) -> Tensor:
        self.kept.detach_()
        self.kept.copy_(X)
        self.kept.add_(1e9).sub_(1e9)
        return self.kept.square()


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("seed", range(4))
def test_numbers_kept_in_a_buffer_move(norm: str, seed: int):
    """The graph saves the buffer, which must hold moved numbers while products are formed."""
    X, f = draw(3, 2, seed=seed), Written()
    J = ls.jacobian(f, X)
    e = ls.local_lipschitz(f, X, norm=norm)
    assert abs(e.value - 2 * X.abs().max().item()) < e.value - e.lower < 1e-4
    kept = f.kept.clone()
    with RoundingNoise(0):
        f(X)
    assert torch.equal(f.kept, kept)
    assert J.mv(X).isfinite().all()  # and has not been changed in place, as far as autograd knows


mp = mpmath.mp.clone()
mp.dps = 40


def exact(W: Tensor):
    return mp.matrix(W.tolist())


def nearest(W) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in W.tolist()], dtype=torch.float64)


def cancelling(seed: int) -> tuple[Tensor, Tensor]:
    """Two matrices of which the product is 1e8 times smaller than its terms."""
    left, right = 1e8 * draw(3, 40, seed=seed), draw(40, 3, seed=seed + 100)
    basis = torch.linalg.qr(right).Q
    return left - left @ basis @ basis.mT + draw(3, 40, seed=seed + 200), right


def singular(seed: int) -> Tensor:
    """A matrix with a condition number of 1e8."""
    left, right = (torch.linalg.qr(draw(3, 3, seed=seed + i)).Q for i in (0, 100))
    return left @ torch.diag(torch.tensor([1, 1e-4, 1e-8], dtype=torch.float64)) @ right


@pytest.mark.parametrize("seed", range(4))
def test_rounding_in_products_of_weights_counts(seed: int):
    """A map may compute its weights; nothing there depends on the input, and everything rounds."""
    X = draw(4, 3, seed=seed + 300)
    left, right = cancelling(seed)
    W = singular(seed)
    pairs = [
        (lambda x: x @ (left @ right), exact(left) * exact(right)),
        (lambda x: x @ torch.linalg.inv(W), exact(W) ** -1),
        (lambda x: x @ torch.linalg.solve(W, torch.eye(3, dtype=torch.float64)), exact(W) ** -1),
    ]
    for f, matrix in pairs:
        truth = torch.linalg.matrix_norm(nearest(matrix), 2).item()
        e = ls.local_lipschitz(f, X)
        assert abs(e.value - truth) < e.value - e.lower < 1e-4 * truth


@pytest.mark.parametrize(
    "product",
    [
        lambda A, B: A @ B,
        lambda A, B: torch.bmm(A[None], B[None])[0],
        lambda A, B: torch.stack([A @ column for column in B.unbind(1)], dim=1),
        lambda A, B: torch.addmm(torch.zeros(3, 3, dtype=A.dtype), A, B),
        lambda A, B: torch.zeros(3, 3, dtype=A.dtype).addmm_(A, B),
        lambda A, B: torch.mm(A, B, out=torch.empty(3, 3, dtype=A.dtype)),
        lambda A, B: torch.einsum("ik,kj->ij", A, B),
        lambda A, B: torch.complex(A, A.abs()).matmul(torch.complex(B, 0 * B)).real,
    ],
    ids=["@", "bmm", "mv", "addmm", "in place", "out", "einsum", "complex"],
)
def test_products_move_in_units_of_their_terms(product):
    left, right = cancelling(0)
    with torch.no_grad():
        still = product(left, right)
        with RoundingNoise(0):
            moved = product(left * 1, right * 1)
    unit = torch.finfo(torch.float64).eps * (left.square() @ right.square()).sqrt()
    assert still.abs().max() < 1e-6 * left.abs().max()
    assert (((moved - still) / unit).abs().max() > 3) and ((moved - still).abs() < 200 * unit).all()


def test_infinite_numbers_stay():
    x = torch.tensor([[-math.inf, 1.0]], dtype=torch.float64)
    with torch.no_grad(), RoundingNoise(0):
        assert (x * 1)[0, 0] == -math.inf and (x @ x.mT).item() == math.inf


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("seed", range(4))
def test_rounding_of_a_matrix_that_is_solved_with_counts(norm: str, seed: int):
    """The elimination loses digits of the matrix, also if the other side of it has moved."""
    W = singular(seed)
    inverse = nearest(exact(W) ** -1)
    e = ls.local_lipschitz(
        lambda X: torch.linalg.solve(W, X, left=False), draw(2, 3, seed=seed + 300), norm=norm
    )
    truth = torch.linalg.matrix_norm(inverse.mT, 2 if norm == "2" else math.inf).item()
    assert e.lower <= truth <= e.upper and e.lower > (1 - 1e-4) * truth


@pytest.mark.wide
def test_equal_weights_stay_equal():
    """Distances of constants to themselves are zero, also when the constants move."""
    C = draw(4, 2)
    with torch.no_grad(), RoundingNoise(0):
        assert not torch.cdist(C, C, compute_mode="donot_use_mm_for_euclid_dist").diagonal().any()


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_rounding_inside_gelu_counts(norm: str, approximate: str):
    """1 + erf(x) has few digits far below zero, and is never seen as a number."""

    def gelu(x):
        if approximate == "none":
            return x * mp.erfc(-x / mp.sqrt(2)) / 2
        return x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3)))

    for x in (-4.3, -5.2, -6.1, -7.3):
        e = ls.local_lipschitz(
            lambda X: functional.gelu(X, approximate=approximate),
            torch.tensor([[x]], dtype=torch.float64),
            norm=norm,
        )
        assert e.lower <= abs(mp.diff(gelu, mp.mpf(x))) <= e.upper


class Foreign(torch.autograd.Function):
    """(x + 1e9) - 1e9, computed by another library."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy((x.detach().numpy() + 1e9) - 1e9)

    @staticmethod
    def backward(ctx, g):
        return g.clone()


class Kernel(torch.autograd.Function):
    """The same by a kernel that writes memory behind torch's back."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        np.copyto(y.numpy(), (x.detach().numpy() + 1e9) - 1e9)
        return y

    @staticmethod
    def backward(ctx, g):
        return g.clone()


class Numbers(torch.autograd.Function):
    """The same by a library that reads Python's numbers, or memory, and returns either."""

    @staticmethod
    def forward(ctx, x, way):
        y = torch.zeros_like(x)
        if way == "numbers":
            for i, number in enumerate(x.flatten().tolist()):
                y.view(-1)[i].fill_((number + 1e9) - 1e9)
            return y
        lost = (x.detach().numpy() + 1e9) - 1e9
        if way == "memory":
            np.copyto(y.numpy(), lost)
            return y
        if way == "dlpack":
            return torch.from_dlpack(lost)
        return torch.frombuffer(bytearray(lost.tobytes()), dtype=x.dtype).reshape(x.shape)

    @staticmethod
    def backward(ctx, g):
        return g.clone(), None


torch.library.define("lipscope_tests::lose", "(Tensor x) -> Tensor")
torch.library.impl("lipscope_tests::lose", "CPU")(lambda x: (x + 1e9) - 1e9)


class Operator(torch.autograd.Function):
    """The same by an operator of another library."""

    @staticmethod
    def forward(ctx, x):
        return torch.ops.lipscope_tests.lose(x)

    @staticmethod
    def backward(ctx, g):
        return g.clone()


@pytest.mark.parametrize(
    ("f", "named"),
    [
        (lambda X: torch.sin(Foreign.apply(X)), "numbers leave torch and come back"),
        (lambda X: X * ((X.sum().item() + 1e9) - 1e9), "numbers leave torch and come back"),
        (lambda X: torch.sin(Kernel.apply(X)), "filled by a kernel outside torch"),
        (lambda X: torch.sin(Operator.apply(X)), "lipscope_tests::lose"),
        (lambda X: torch.sin(Numbers.apply(X, "numbers")), "numbers leave torch and come back"),
        (lambda X: torch.sin(Numbers.apply(X, "memory")), "filled by a kernel outside torch"),
        (lambda X: torch.sin(Numbers.apply(X, "dlpack")), "numbers leave torch and come back"),
        (lambda X: torch.sin(Numbers.apply(X, "bytes")), "numbers leave torch and come back"),
        (lambda X: torch.digamma(X.abs() + 1), "polygamma to about half of its digits"),
    ],
    ids=[
        "numpy",
        "item",
        "kernel",
        "operator",
        "numbers",
        "memory",
        "dlpack",
        "bytes",
        "polygamma",
    ],
)
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_what_cannot_be_moved_is_named_and_nothing_is_claimed(f, named, norm):
    e = ls.local_lipschitz(f, draw(3, 2), norm=norm)
    assert e.lower == 0 and e.upper == math.inf and e.confidence == 0
    assert named in e.note and e.status is ls.Status.IMPRECISE and math.isfinite(e.value)


@pytest.mark.parametrize(
    "f",
    [
        lambda X: X * torch.tensor([0.3, 0.7], dtype=torch.float64),
        lambda X: X * draw(3).sum().item(),
        lambda X: X @ torch.from_numpy(np.eye(2)),
        lambda X: checkpoint(torch.sin, X, use_reentrant=False),
        lambda X: X.add_(float(X.detach().abs().max() > 0)).mul_(0.5),
        lambda X: X * torch.tensor(0.5, dtype=X.dtype) if X.tolist() else X,
        lambda X: X * (0.5 + torch.zeros_like(torch.empty_like(X))),
        lambda X: torch.autograd.grad(
            (X.exp() * torch.tensor(0.5, dtype=X.dtype)).sum(), X, create_graph=True
        )[0],
    ],
    ids=[
        "constant",
        "scalar of weights",
        "numpy constant",
        "checkpoint",
        "input in place",
        "looked at",
        "shaped like memory not yet filled",
        "gradient",
    ],
)
def test_constants_made_inside_a_map_are_no_doubt(f):
    e = ls.local_lipschitz(f, draw(3, 2), gap=0.01)
    assert e.status.ok and e.lower > 0.99 * e.value and e.upper < 1.01 * e.value


def test_a_map_that_fails_when_moved_has_a_value_and_no_bounds():
    def f(X):
        return X[:, : int(torch.ones(3, dtype=torch.float64).sum() + 0 * X.sum())] * 2

    found = [ls.local_lipschitz(f, draw(3, 4, seed=seed)) for seed in range(4)]
    assert all(e.value == pytest.approx(2.0) for e in found)
    assert any("when its numbers move" in e.note and e.lower == 0 for e in found)


def test_a_map_that_fails_elsewhere_has_a_value_and_no_bounds():
    X = draw(3, 2)

    def f(x):
        if abs(x.sum().item() - X.sum().item()) > 1e-6:
            raise ValueError("another input")
        return x * torch.tensor(2.0, dtype=torch.float64)

    e = ls.local_lipschitz(f, X)
    assert e.value == pytest.approx(2.0) and e.lower == 0 and "another input" in e.note


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("eager, add_in_place", compiled.TRUE),
        ("eager, inside another module", compiled.TRUE),
        ("aot_eager, add_in_place", compiled.REFUSED),
        ("aot_eager, dynamic", compiled.REFUSED),
    ],
)
def test_a_compiled_map_is_right_or_refused_with_the_remedy(name, ended):
    found = dict(compiled.cases())[name]()
    assert found.startswith(ended)
    assert ended == compiled.TRUE or found.endswith("measure it without torch.compile")


def test_unseen_rounding_of_an_inverse_leaves_no_bound():
    class G(torch.nn.Module):
        constant = 0.5

        def forward(self, x):
            return 0.5 * torch.sin(Foreign.apply(x))

    found = ls.nn.InvertibleResidual(G()).inverse(draw(2, 3))
    assert found.error_bound == math.inf


def test_numbers_move_by_15_units_in_the_root_mean_square_and_30_with_the_factor():
    """As the documentation has it: three draws of up to 26 units, widened twice."""
    x = torch.ones(100_000, dtype=torch.float64)
    with RoundingNoise(0) as mode:
        mode.computed.add(x.untyped_storage()._cdata)
        moved = (x * 1.0 - 1.0).abs()
    # The two products and differences move one after the other; the second one hardly matters.
    units = moved / torch.finfo(torch.float64).eps
    assert 25 < units.max() < 27
    rms = units.square().mean().sqrt().item()
    assert rms == pytest.approx(15, rel=0.03) and WIDENED * rms == pytest.approx(30, rel=0.03)
    assert DRAWS == 3


def test_cancellation_inside_the_first_operation_of_an_inverse_counts():
    """g is 0.5 sin(1), but for rounding: 3 (x - x') less (3 x - 3 x'), a million times each."""
    first = 1e6 * torch.tensor([[1.0, -1.0], [3.0, -3.0]], dtype=torch.float64)
    then = torch.tensor([[3.0, 3.0], [-1.0, -1.0]], dtype=torch.float64)

    class G(torch.nn.Module):
        constant = 0.5

        def forward(self, x):
            return 0.5 * torch.sin(x @ first.mT @ then + 1)

    for seed in range(8):
        x = draw(1, 1, seed=seed) * torch.tensor([[1.0, 1 + 1e-9]], dtype=torch.float64)
        found = ls.nn.InvertibleResidual(G()).inverse(x)
        wanted = [mp.mpf(number) - mp.sin(1) / 2 for number in x[0].tolist()]
        error = mp.norm([a - b for a, b in zip(found.value[0].tolist(), wanted, strict=True)])
        assert error <= found.error_bound.item() < 1e-6


def test_weights_of_a_coarser_dtype_do_not_move_before_they_are_exact():
    """A float32 weight is a number of float64: its own units are not those of the map."""
    g = torch.Generator().manual_seed(0)
    W, X = torch.randn(5, 5, generator=g), torch.randn(4, 5, generator=g, dtype=torch.float64)
    for f in (lambda x: x @ W.double(), lambda x: x @ torch.empty_like(x[:1]).copy_(W[:1]).mT):
        e = ls.local_lipschitz(f, X, solver=ls.Solver(seed=0))
        assert 0 < e.value - e.lower < 1e-12 * e.value
