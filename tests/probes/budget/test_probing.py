"""Batched probes give the gradients of single ones, whatever operation is in the way."""

import pytest
import torch

from lipscope.probes.budget import tracing
from lipscope.probes.budget.tracing import batches, gradients


class Unbatched(torch.autograd.Function):
    """An operation whose backward pass reads a number, which a batch does not have."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * (2 if g.sum().item() == g.sum().item() else 0)


def graph(op, dtype=torch.float64):
    x = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    w = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    unused = torch.randn(2, dtype=dtype, requires_grad=True)
    h = op(x @ w)
    return [h.tanh(), h.square().sum(dim=-1)], [x, w, unused]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", [torch.sin, Unbatched.apply], ids=["plain", "not batchable"])
def test_batched_gradients_are_those_of_single_probes(op, dtype):
    outputs, tensors = graph(op, dtype)
    probes = [torch.randn(6, *y.shape, dtype=dtype) for y in outputs]
    got = gradients(outputs, probes, tensors)
    assert got[2] is None
    for k in range(6):
        v = [p[k] for p in probes]
        right = torch.autograd.grad(outputs, tensors[:2], v, retain_graph=True)
        for g, r in zip(got[:2], right, strict=True):
            torch.testing.assert_close(g[k], r)


def test_batches_cover_all_probes_within_memory(monkeypatch):
    tensors = [torch.zeros(10, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    monkeypatch.setattr(tracing, "BYTES", 350)  # three times 80 + 24 bytes
    assert list(batches(8, tensors)) == [range(3), range(3, 6), range(6, 8)]
    monkeypatch.setattr(tracing, "BYTES", 1)
    assert [len(batch) for batch in batches(3, tensors)] == [1, 1, 1]
    monkeypatch.undo()
    assert list(batches(8, tensors)) == [range(8)]
    # Long sequences run in float32, one probe after another: only one of them is in memory.
    assert [len(batch) for batch in batches(3, [torch.zeros(2)])] == [1, 1, 1]
