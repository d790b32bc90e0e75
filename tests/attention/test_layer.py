"""SelfAttention: the map itself, its parts, and what it refuses."""

from dataclasses import replace

import pytest
import torch

import lipscope as ls
from tests.cases import KINDS, problem
from tests.naive import naive_layer


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(**options) -> ls.SelfAttention:
    weights = {
        "Q": draw(6, 4),
        "K": draw(6, 4, seed=1),
        "V": draw(10, 4, seed=2),
        "O": draw(3, 10, seed=3),
        "heads": 2,
    }
    return ls.SelfAttention(**(weights | options))


@pytest.mark.parametrize("kind", KINDS)
def test_value_against_the_definition(kind):
    f, X = problem(kind, 0)
    expected = naive_layer(f, X)
    scale = expected.abs().max().clamp_min(1e-300)
    assert ((f(X) - expected).abs() / scale).max() < 1e-10


@pytest.mark.parametrize(
    "kind", ["multi-head, projected", "grouped keys", "one key head", "sinks", "rotary, biases"]
)
def test_heads_alone_and_apart_are_the_columns_of_the_whole(kind):
    f, X = problem(kind, 1)
    joined = replace(f, O=None)(X)
    apart = f.heads_apart()(X)
    for h, columns in enumerate(joined.chunk(f.heads, dim=-1)):
        assert torch.allclose(f.head(h)(X), columns) and torch.allclose(apart[h], columns)


def test_a_batch_is_its_members():
    f, X = layer(causal=True), draw(3, 5, 4)
    assert torch.allclose(f(X), torch.stack([f(x) for x in X]))


def test_padding_is_the_shorter_sequence():
    """A padded batch gives each member what it gives alone: value, and Jacobian norm."""
    X, lengths = draw(3, 6, 4), [6, 2, 4]
    padding = torch.arange(6) < torch.tensor(lengths)[:, None]
    f = layer(padding=padding)
    norms = ls.local_lipschitz(f, X, tol=1e-10).value
    for i, n in enumerate(lengths):
        assert torch.allclose(f(X)[i, :n], layer()(X[i, :n])) and f(X)[i, n:].abs().sum() == 0
        assert norms[i].item() == pytest.approx(
            ls.local_lipschitz(layer(), X[i, :n], tol=1e-10).value, rel=1e-11
        )


def test_to_moves_every_tensor():
    f = layer(
        biases=(draw(6), draw(6), None),
        mask=torch.ones(5, 5, dtype=torch.bool),
        kernel=ls.Dot(sinks=draw(2)),
    )
    g = f.to(torch.float32)
    assert g.Q.dtype == g.O.dtype == g.biases[0].dtype == g.kernel.sinks.dtype == torch.float32
    assert g.mask.dtype == torch.bool and g.double().Q.dtype == torch.float64
    assert f.to(torch.zeros(1).float()).mask.dtype == torch.bool


def test_rotation_is_an_isometry_with_its_adjoint():
    rope, x, y = ls.Rope.standard(7, 6), draw(2, 7, 6), draw(2, 7, 6, seed=1)
    assert torch.allclose(rope.turn(x).norm(dim=-1), x.norm(dim=-1))
    assert torch.allclose((rope.turn(x) * y).sum(), (x * rope.turn_back(y)).sum())
    scores = rope.turn(x[0, :1].expand(7, -1)) @ rope.turn(y[0, :1].expand(7, -1)).T
    assert torch.allclose(scores.diagonal(2), scores[0, 2].expand(5)), (
        "scores depend on the distance of positions alone"
    )


NAN = draw(5, 4).index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan).double())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layer()(NAN), r"X holds nan at index \[3, 1\] \(shape \(5, 4\)\)"),
        (lambda: layer().jacobian(draw(5, 4) / 0), r"X holds -?inf at index \[0, 0\]"),
        (lambda: layer()(draw(4)), r"X must have shape \[n, d\] or \[B, n, d\], got \(4,\)"),
        (lambda: layer()(draw(0, 4)), "X is empty"),
        (lambda: layer()(draw(5, 3)), "X has token size 3"),
        (lambda: layer()(torch.ones(5, 4, dtype=torch.int64)), "X must be a floating-point tensor"),
        (
            lambda: layer()(draw(5, 4).float()),
            "X is torch.float32 and the weights are torch.float64",
        ),
        (lambda: layer(Q=draw(6)), "Q must be a matrix"),
        (
            lambda: layer(
                Q=draw(6, 4).index_put(
                    (torch.tensor(2), torch.tensor(0)), torch.tensor(torch.inf).double()
                )
            ),
            r"Q holds inf at index \[2, 0\]",
        ),
        (lambda: layer(K=draw(6, 5)), r"K must have shape \[2 \* size, 4\]"),
        (lambda: layer(K=draw(8, 4)), "Q has 3 rows per head and K has 4"),
        (lambda: layer(heads=4, kv_heads=3), "heads=4 must be a multiple of kv_heads=3"),
        (lambda: layer(O=draw(3, 9)), r"O must have shape \[d, 10\]"),
        (lambda: layer(V=draw(10, 4).float()), "V is torch.float32 and Q is torch.float64"),
        (lambda: layer(biases=(draw(5), None, None)), r"bq must have shape \[6\]"),
        (
            lambda: layer(mask=torch.ones(4, 4, dtype=torch.bool))(draw(5, 4)),
            r"mask must have shape \(5, 5\)",
        ),
        (
            lambda: layer(mask=torch.full((5, 5), torch.inf).double())(draw(5, 4)),
            "mask holds NaN or",
        ),
        (
            lambda: layer(padding=torch.ones(4, dtype=torch.bool))(draw(5, 4)),
            r"padding must have shape \(5,\)",
        ),
        (lambda: layer().head(2), "head 2 does not exist; the layer has heads 0 to 1"),
        (lambda: layer(kernel=ls.Dot(rope=ls.Rope.standard(3, 3)))(draw(5, 4)), "rope"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ls.UserError, match=message):
        build()
