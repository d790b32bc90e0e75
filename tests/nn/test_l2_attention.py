"""L2 attention against its formula, and its bound against measurements."""

import math

import pytest
import torch
from torch import Tensor

import lipscope as ls
from lipscope.nn.l2_attention import reaction
from tests.nn.climb import climbed

NORMS = ("2", "inf")


def by_the_formula(layer: ls.nn.L2SelfAttention, X: Tensor) -> Tensor:
    """[P^h X A_h W_V^h]_h W_O, A_h = W_Q W_Q' / sqrt(k), multiplied out as in the paper."""
    k, heads = layer.dim // layer.heads, []
    for h in range(layer.heads):
        W_Q = layer.query.weight[h * k : (h + 1) * k].T
        W_V = 3 * math.sqrt(layer.dim) * layer.value.weight[h * k : (h + 1) * k].T
        Y = X @ W_Q
        scores = -(Y[:, None] - Y[None]).square().sum(-1) / math.sqrt(k)
        if layer.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ X @ (W_Q @ W_Q.T / math.sqrt(k)) @ W_V)
    return torch.cat(heads, 1) @ layer.out.weight.T


def unit_layer(n_heads: int = 1) -> ls.nn.L2SelfAttention:
    """D = H = 1 with A_h = W_V = W_O = 1."""
    layer = ls.nn.L2SelfAttention(1, n_heads).double()
    with torch.no_grad():
        layer.query.weight.fill_(1.0)
        layer.value.weight.fill_(1 / 3)
        layer.out.weight.fill_(1.0)
    return layer


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "heads"), [(6, 1), (6, 3), (8, 2), (1, 1)])
def test_the_layer_is_the_formula(dim, heads, causal):
    torch.manual_seed(dim)
    layer, X = ls.nn.L2SelfAttention(dim, heads, causal).double(), torch.randn(7, dim).double() * 2
    torch.testing.assert_close(layer(X), by_the_formula(layer, X), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(layer(torch.stack([X, -X]))[1], layer(-X), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "make",
    [ls.nn.L2SelfAttention, lambda d, h, c: ls.nn.ContractiveL2Attention(d, h, 0.7, causal=c)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_as_map_is_the_layer(make, causal):
    torch.manual_seed(0)
    layer, X = make(8, 2, causal).double(), torch.randn(2, 9, 8).double()
    f = layer.as_map(9)
    torch.testing.assert_close(f(X), layer(X), rtol=1e-12, atol=1e-14)
    dense = torch.autograd.functional.jacobian(layer, X[0]).reshape(72, 72)
    assert not f.Q.requires_grad
    assert ls.local_lipschitz(f, X[0], 1e-10).value == pytest.approx(
        torch.linalg.matrix_norm(dense, 2).item(), rel=1e-9
    )
    layer.query.weight.data.mul_(2)
    assert not torch.equal(f.Q, layer.query.weight), "the map must not follow the layer"


def test_the_bound_is_at_most_those_of_the_theorems():
    torch.manual_seed(0)
    gains = []
    for causal in (False, True):
        layer = ls.nn.L2SelfAttention(8, 2, causal).double()
        for n in (1, 2, 9, 40):
            for norm in NORMS:
                rows = ls.bounds(layer.as_map(n), ls.Everywhere(n), norm=norm)
                offered = min(row.value for row in rows if row.kind == "upper")
                assert layer.lipschitz_bound(n, norm) <= offered * (1 + 1e-9)
                gains.append(offered / layer.lipschitz_bound(n, norm))
                if norm == "2":
                    (same,) = (row.value for row in rows if row.name == "L2 attention")
                    assert layer.lipschitz_bound(n, norm) == pytest.approx(same, rel=1e-10)
    assert max(gains) > 1.5


@pytest.mark.parametrize("norm", NORMS)
def test_one_head_and_identity_weights_give_the_theorems_bound(norm):
    """Nothing is gained and nothing is lost where there is nothing to reorder; causal and full."""
    for causal in (False, True):
        layer = ls.nn.L2SelfAttention(3, 1, causal).double()
        with torch.no_grad():
            layer.query.weight.copy_(torch.eye(3))
            layer.value.weight.copy_(torch.eye(3).double() / 3)
            layer.out.weight.copy_(torch.eye(3))
        constant = reaction(7, 3, causal, norm)
        if norm == "inf":  # 4 phi, to which a query of length sqrt(3) adds its own factor
            constant = 1 + math.sqrt(3) * constant
        assert layer.lipschitz_bound(7, norm) == pytest.approx(constant, rel=1e-11)
        offered = ls.bounds(layer.as_map(7), ls.Everywhere(7), norm=norm)
        assert layer.lipschitz_bound(7, norm) == pytest.approx(
            min(r.value for r in offered if r.kind == "upper")
        )


@pytest.mark.parametrize("norm", NORMS)
def test_the_bound_is_differentiable_in_every_weight(norm):
    torch.manual_seed(3)
    layer = ls.nn.L2SelfAttention(4, 2).double()
    weights = tuple(layer.parameters())
    assert torch.autograd.gradcheck(lambda *_: layer.bound_tensor(5, norm), weights, eps=1e-6)


def test_identity_weights_give_the_constant_of_the_paper():
    """4 phi + 1 for the largest coordinate at D = 1, phi = W_0((N - 1) / e)."""
    for N in (2, 10, 1000):
        low, high = 0.0, 10.0
        for _ in range(80):  # phi e^(phi + 1) = N - 1
            phi = (low + high) / 2
            low, high = (phi, high) if phi * math.exp(phi + 1) < N - 1 else (low, phi)
        assert reaction(N, 1, False, "inf") == pytest.approx(4 * phi, rel=1e-10)
        assert unit_layer().lipschitz_bound(N, "inf") == pytest.approx(4 * phi + 1, rel=1e-10)


def test_the_constant_does_not_ask_where_tensors_are_made():
    with torch.device("meta"):
        assert reaction(23, 3, True, "2") > 1


def test_one_dimension_almost_attains_the_bound():
    """x_1 = 0, the rest at +-t, t^2 = 1 + phi: 4 phi + (1 - phi) / (1 + phi) tends to the bound."""
    for N in (3, 11, 101):
        phi = reaction(N, 1, False, "inf") / 4
        t = math.sqrt(1 + phi)
        X = torch.tensor([[0.0]] + [[t], [-t]] * ((N - 1) // 2), dtype=torch.float64)
        closed = 4 * phi + (1 - phi) / (1 + phi)
        measured = ls.local_lipschitz(unit_layer().as_map(N), X, norm="inf").value
        assert measured == pytest.approx(closed, rel=1e-10)
        assert 4 * phi - 1 < measured < unit_layer().lipschitz_bound(N, "inf")


def one_among_two(layer: ls.nn.L2SelfAttention, n: int) -> Tensor:
    """The worst one-dimensional input along the first head's top direction, with noise."""
    Q = layer.query.weight[: layer.head_size].detach()
    phi = reaction(n, 1, False, "inf") / 4
    u = torch.linalg.svd(Q)[2][0]
    t = math.sqrt((1 + phi) * math.sqrt(layer.head_size)) / (Q @ u).norm()
    X = (1.0 - 2.0 * (torch.arange(n) % 2))[:, None] * t * u
    X[-1] = 0
    return X + 0.02 * t * torch.randn(n, layer.dim).double()


def ratios(n: int, seed: int, steps: int) -> dict[tuple[str, str], float]:
    """The best constant of two ascents over the bound, in either norm, full and causal."""
    torch.manual_seed(seed)
    heads = 1 + seed % 2
    # Rows of the Jacobian take n^2 numbers each.
    dim, found = heads * (1 + seed // 2 % 3 if n <= 64 else 1), {}
    for causal in (False, True):
        layer = ls.nn.L2SelfAttention(dim, heads, causal).double()
        size = 10 ** float(torch.rand(()) * 2 - 0.5)
        with torch.no_grad():
            layer.query.weight.mul_(size)
        f = layer.as_map(n)
        starts = [one_among_two(layer, n), 0.5 * torch.randn(n, dim).double() / size]
        for norm in NORMS:
            best = max(climbed(f, X, norm, steps) for X in starts)
            found[norm, "causal" if causal else "full"] = best / layer.lipschitz_bound(n, norm)
    return found


@pytest.mark.parametrize("n", [2, 5, 17])
def test_no_climb_exceeds_the_bound(n):
    assert all(0.05 < ratio <= 1 for ratio in ratios(n, seed=n % 3, steps=8).values())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 8, 32, 64, 128, 256])
def test_no_long_climb_exceeds_the_bound(n):
    """pytest -s -m slow tests/nn/test_l2_attention.py prints the largest ratios"""
    runs = [
        ratios(n, seed, steps=60 if n <= 32 else 10)
        for seed in range({2: 6, 3: 6, 8: 6, 32: 3}.get(n, 1))
    ]
    worst = {case: max(run[case] for run in runs) for case in runs[0]}
    print(n, {" ".join(case): round(ratio, 3) for case, ratio in worst.items()})
    assert max(worst.values()) <= 1


@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_with_several_heads_stay_below_the_bound(causal):
    """N = 256: the whole norm 2, and in norm inf the rows of the last token, which sees all."""
    torch.manual_seed(0)
    layer = ls.nn.L2SelfAttention(6, 2, causal).double()
    f, last = layer.as_map(256), torch.zeros(6, 256, 6).double()
    last[torch.arange(6), -1, torch.arange(6)] = 1
    X = torch.stack(
        [one_among_two(layer, 256), *(s * torch.randn(256, 6).double() for s in (0.5, 3.0, 30.0))]
    )
    found = ls.local_lipschitz(f, X, 1e-2).value.max().item()
    assert 0.02 < found / layer.lipschitz_bound(256) <= 1
    rows = [f.jacobian(x).rmv(u).abs().sum().item() for x in X for u in last]
    assert 0.02 < max(rows) / layer.lipschitz_bound(256, "inf") <= 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ls.nn.L2SelfAttention(8, 3), "multiple of heads=3"),
        (lambda: ls.nn.L2SelfAttention(0, 1), "dim must be a positive integer"),
        (
            lambda: ls.nn.L2SelfAttention(8, 2)(torch.randn(5, 7)),
            r"\[B, n, 8\], got torch.float32 \(5, 7\)",
        ),
        (lambda: ls.nn.L2SelfAttention(8, 2)(torch.randn(8)), r"got torch.float32 \(8,\)"),
        (lambda: ls.nn.L2SelfAttention(8, 2)(torch.zeros(5, 8).long()), "floating-point tokens"),
        (lambda: ls.nn.L2SelfAttention(8, 2).lipschitz_bound(0), "at least 1, got 0"),
        (
            lambda: ls.nn.L2SelfAttention(8, 2).lipschitz_bound(4, 3),
            "norm must be '2' or 'inf', got",
        ),
    ],
)
def test_errors_say_what_to_do(call, words):
    with pytest.raises(ls.UserError, match=words):
        call()


def test_a_bound_of_broken_weights_is_refused():
    layer = ls.nn.L2SelfAttention(8, 2)
    layer.out.weight.data[0, 0] = math.nan
    with pytest.raises(ls.UserError, match=r"out\.weight is not finite"):
        layer.lipschitz_bound(4)


def kim_layer(W_Q: Tensor, W_V: Tensor, W_O: Tensor, X: Tensor, causal: bool) -> Tensor:
    """L2 multi-head attention with tied queries and keys, written as in Kim et al. 2021."""
    n, k = len(X), W_Q.shape[-1]
    heads = []
    for w_q, w_v in zip(W_Q, W_V, strict=True):
        P = torch.zeros(n, n, dtype=X.dtype)
        for i in range(n):
            seen = range(i + 1) if causal else range(n)
            distances = [(X[i] @ w_q - X[j] @ w_q).square().sum() for j in seen]
            logits = -torch.stack(distances) / math.sqrt(k)
            P[i, : len(logits)] = logits.exp() / logits.exp().sum()
        heads.append(P @ X @ (w_q @ w_q.T / math.sqrt(k)) @ w_v)
    return torch.cat(heads, dim=1) @ W_O


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "k"), [(1, 3), (2, 4), (4, 1)])
def test_weights_of_the_paper_give_the_same_map(heads, k, causal):
    g = torch.Generator().manual_seed(heads)
    dim = heads * k
    W_Q, W_V = (torch.randn(heads, dim, k, generator=g).double() / 2 for _ in range(2))
    W_O, X = torch.randn(dim, dim, generator=g).double(), torch.randn(5, dim, generator=g).double()
    layer = ls.nn.L2SelfAttention.from_kim2021(W_Q, W_V, W_O, causal)
    expected = kim_layer(W_Q, W_V, W_O, X, causal)
    assert layer.causal == causal and layer.out.weight.dtype == torch.float64
    assert (layer(X) - expected).abs().max() < 1e-13 * expected.abs().max()
    # The values carry the factor 3 sqrt(dim) of the layer.
    back = 3 * math.sqrt(dim) * layer.value.weight.T.reshape(dim, heads, k).transpose(0, 1)
    torch.testing.assert_close(back, W_V, rtol=1e-14, atol=0)
    bound = layer.lipschitz_bound(5)
    J = torch.autograd.functional.jacobian(lambda X: kim_layer(W_Q, W_V, W_O, X, causal), X)
    assert torch.linalg.matrix_norm(J.reshape(5 * dim, 5 * dim), 2) <= bound


def test_weights_of_the_paper_that_do_not_fit_are_refused():
    W = torch.randn(2, 8, 4)
    for wrong in ((W, W, torch.eye(7)), (W, W[:1], torch.eye(8)), (W[0], W[0], torch.eye(8))):
        with pytest.raises(ls.UserError, match=r"shape \[heads, dim, dim / heads\]"):
            ls.nn.L2SelfAttention.from_kim2021(*wrong)
