"""Row sums of L2 attention: each step of the proof, and the bound against ascent on everything."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import lipscope as ls
from lipscope.nn.l2_attention import longest_image, radius, score_limit
from tests.nn.test_query_ball import configurations, limit


def longest(W: Tensor) -> float:
    """max |W x|_2 over |x|_inf <= 1, attained by signs: all of them."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=W.shape[1])), dtype=W.dtype)
    return (signs @ W.T).norm(dim=1).max().item()


def test_the_longest_image_is_not_underestimated():
    torch.manual_seed(0)
    line = torch.outer(torch.ones(3), torch.tensor([1.0, 0, 0, 0, 0, 0, 0])).double()
    for W in (*torch.randn(20, 3, 7).double(), torch.eye(7).double(), line):
        assert longest(W) <= longest_image(W).item() <= 1.6 * longest(W)
    # One attained by rows, one by the spectral norm.
    assert longest_image(line).item() == pytest.approx(math.sqrt(3), rel=1e-12)
    H = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    assert longest_image(H).item() == pytest.approx(2.0, rel=1e-12)


def test_two_contractions_leave_a_ball_around_a_third():
    """|A B w - w / 3| <= 2 |w| / 3 for 0 <= A, B <= 1, attained by projections."""
    torch.manual_seed(0)
    worst = 0.0
    for _ in range(400):
        w, u, v = torch.nn.functional.normalize(torch.randn(3, 2).double(), dim=1)
        found = torch.outer(u, u) @ torch.outer(v, v) @ w
        worst = max(worst, (found - w / 3).norm().item())
        A, B = (
            (U := torch.linalg.qr(torch.randn(4, 4).double())[0]) @ torch.rand(4).double().diag()
            @ U.T
            for _ in range(2)
        )  # fmt: skip
        w = torch.randn(4).double()
        assert (A @ B @ w - w / 3).norm() <= 2 / 3 * w.norm()
    assert 0.66 < worst <= 2 / 3 * (1 + 1e-12)


@pytest.mark.parametrize("D", [0.05, 0.5, 1.0, 2.0])
def test_the_keys_of_a_row_are_within_their_limit(D):
    """sqrt(m sum_j |beta_j|^2) <= sqrt(D Gamma), at inputs climbed for it; mostly reached."""
    torch.manual_seed(0)
    rho, best = radius(D, 2), 0.0
    allowed = math.sqrt(D * score_limit(torch.tensor(D, dtype=torch.float64)).item())
    for start in configurations(8, 2, rho, 0):
        Y = (start + 0.1 * rho * torch.randn_like(start)).requires_grad_(True)
        climb = torch.optim.Adam([Y], lr=0.05 * rho)
        for _ in range(60):
            inside = Y * (rho / Y.norm(dim=1, keepdim=True).clamp_min(rho))
            d = (inside[0] - inside).square().sum(1) / math.sqrt(2)
            p = (-d).softmax(0)
            x = (inside - p @ inside)[:, 0]
            found = (4 / math.sqrt(2) * 8 * p**2 * x**2 * d).sum().sqrt()
            best = max(best, found.item())
            climb.zero_grad()
            (-found).backward()
            climb.step()
    assert (0.75 if D <= 1 else 0.5) * allowed < best <= allowed


def by_the_formula(layer: ls.nn.L2SelfAttention, phi: float) -> float:
    """Row by row and head by head, heads balanced by their ||M_h||."""
    k, heads = layer.head_size, range(layer.heads)
    parts = [slice(h * k, (h + 1) * k) for h in heads]
    Q, M, w = [], [], []
    for part in parts:
        M.append(
            layer.value.weight[part] @ layer.query.weight[part].T * 3 * math.sqrt(layer.dim / k)
        )
        size = torch.linalg.matrix_norm(M[-1], 2)
        Q.append(layer.query.weight[part] * size)
        w.append(layer.out.weight[:, part] @ M[-1] / size)
    D = [0.0] * len(parts) if layer.ball is None else layer.ball.sizes(Q[0].device).tolist()

    def q(W: Tensor) -> float:
        spectral = math.sqrt(layer.dim) * torch.linalg.matrix_norm(W, 2).item()
        return min(spectral, math.hypot(*W.abs().sum(1).tolist()))

    found = []
    for r in range(layer.dim):
        lengths = [w[h][r].norm().item() for h in heads]
        apart = 0.0
        for h in heads:
            reach = q(Q[h]) * lengths[h]
            row = min(reach, (w[h][r].abs() @ Q[h].abs().sum(1)).item())
            in_ball = 0.5 * row + (0.5 + min(4 * phi, 1.24 * D[h])) * reach
            apart += row + 4 * phi * reach if layer.ball is None else in_ball
        through = sum(w[h][r] @ Q[h] for h in heads).abs().sum().item() / 2
        own = sum(D[h] * w[h][r] @ Q[h] for h in heads).abs().sum().item() / 6
        c = [math.exp(x / 2) / 2 + math.sqrt(x * limit(x)) for x in D]
        around = math.hypot(*(c[h] * lengths[h] for h in heads))
        around += math.hypot(*(D[h] * lengths[h] for h in heads)) / 3
        together = through + own + q(torch.cat(Q)) * around
        found.append(apart if layer.ball is None else min(apart, together))
    return max(found)


@pytest.mark.parametrize("ball", [None, 0.1, 1.0, 3.0])
def test_the_bound_is_that_of_the_formula(ball):
    phi = 1.0401125822356918
    assert phi * math.exp(phi + 1) == pytest.approx(8, rel=1e-12)  # 9 tokens
    for seed, heads in product(range(3), (1, 2, 4)):
        torch.manual_seed(seed)
        if ball is None:
            layer = ls.nn.L2SelfAttention(8, heads).double().requires_grad_(False)
        else:
            layer = ls.nn.BallL2Attention(8, heads, ball=ball, learn_ball=True).double()
            layer.requires_grad_(False).ball.log_size.add_(torch.rand(heads) - 0.5)
        found = layer.lipschitz_bound(9, "inf")
        assert found == pytest.approx(by_the_formula(layer, phi), rel=1e-7)


def climbed(layer: ls.nn.L2SelfAttention, n: int, norm: str, steps: int, seed: int) -> float:
    """The largest row sum over the bound, by ascent on the input and on every weight."""
    torch.manual_seed(seed)
    X = torch.randn(n, layer.dim, dtype=torch.float64, requires_grad=True)
    climb = torch.optim.Adam([X, *layer.parameters()], lr=0.05)
    best = 0.0
    for _ in range(steps):
        J = torch.autograd.functional.jacobian(
            lambda X: plain(layer, X), X, create_graph=True
        ).reshape(X.numel(), -1)
        found = J.abs().sum(dim=1).amax() / layer.bound_tensor(n, norm)
        best = max(best, found.item())
        climb.zero_grad()
        (-found.log()).backward()
        climb.step()
    return best


def plain(layer: ls.nn.L2SelfAttention, X: Tensor) -> Tensor:
    """The layer from its definition, twice differentiable."""
    k, heads = layer.head_size, []
    for h in range(layer.heads):
        Q, V = (W.weight[h * k : (h + 1) * k] for W in (layer.query, layer.value))
        Y = X @ Q.T
        if layer.ball is not None:
            rho = k**0.25 / 2 * layer.ball.sizes(X.device)[h].sqrt()
            Y = Y * (rho / Y.norm(dim=1, keepdim=True).clamp_min(rho))
        scores = -(Y[:, None] - Y[None]).square().sum(-1) / math.sqrt(k)
        if layer.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        M = V @ Q.T * 3 * math.sqrt(layer.dim / k)
        heads.append(scores.softmax(-1) @ Y @ M.T)
    return torch.cat(heads, 1) @ layer.out.weight.T


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ball", [None, 0.1, 1.0, 3.0])
def test_ascent_on_inputs_and_weights_does_not_exceed_the_bound(ball, causal):
    torch.manual_seed(0)
    if ball is None:
        layer = ls.nn.L2SelfAttention(4, 2, causal).double()
    else:
        layer = ls.nn.BallL2Attention(4, 2, causal, ball, learn_ball=True).double()
    X = torch.randn(5, 4).double()
    torch.testing.assert_close(plain(layer, X), layer(X), rtol=1e-9, atol=1e-11)
    assert 0.3 < climbed(layer, 5, "inf", 30, seed=1) <= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ball", [None, 0.1, 0.5, 1.0, 3.0])
def test_long_ascent_on_inputs_and_weights_does_not_exceed_the_bound(ball):
    """pytest -s -m slow tests/nn/test_row_sums.py prints the largest ratios"""
    worst = {}
    for heads, causal in product((1, 2, 4), (False, True)):
        torch.manual_seed(0)
        if ball is None:
            layer = ls.nn.L2SelfAttention(2 * heads, heads, causal).double()
        else:
            layer = ls.nn.BallL2Attention(2 * heads, heads, causal, ball).double()
        found = climbed(layer, 5, "inf", 80, seed=1)
        worst[heads] = max(worst.get(heads, 0.0), found)
    print(ball, {heads: round(found, 3) for heads, found in worst.items()})
    assert max(worst.values()) <= 1


def test_the_contractive_layer_is_strong_for_the_largest_coordinate():
    """At 128 tokens a fresh layer in a ball reacts with a fifth of what it is promised, or more."""
    torch.manual_seed(0)
    X = torch.randn(128, 32).double()
    U = torch.zeros(32, 128, 32).double()
    U[torch.arange(32), -1, torch.arange(32)] = 1
    found = []
    for ball in (None, 1.0, 0.25):
        torch.manual_seed(0)
        layer = ls.nn.ContractiveL2Attention(32, 4, 0.9, "inf", ball=ball).double()
        J = ls.jacobian(layer.requires_grad_(False), X)
        found.append(max(J.rmv(u).abs().sum().item() for u in U) / 0.9)
    assert 0.03 < found[0] < 0.2 < found[1] and 0.35 < found[2] <= 1


def test_never_above_the_product_of_row_sums():
    """Kim et al.: (4 sqrt(k) phi + 1) ||O||_inf max_h ||M_h||_inf ||Q_h||_inf."""
    for seed in range(6):
        torch.manual_seed(seed)
        layer = ls.nn.L2SelfAttention(8, 1 + seed % 2).double()
        with torch.no_grad():
            for W in layer.parameters():
                W.copy_(W * (torch.rand_like(W) < 0.3 + 0.1 * seed))
                W[0, 0] = 1
        for n in (1, 2, 30):
            rows = ls.bounds(layer.as_map(n), ls.Everywhere(n), norm="inf")
            offered = min(row.value for row in rows if row.kind == "upper")
            assert layer.lipschitz_bound(n, "inf") <= offered * (1 + 1e-9)
