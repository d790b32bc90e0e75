"""Rounding followed operation by operation, against runs that really round."""

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.probes.budget import tracing
from lipscope.probes.budget.formats import DTYPES
from lipscope.probes.budget.rounding import (
    FIXED_NORMS,
    WEIGHT,
    RoundingTrace,
    follow_run,
    squared_errors,
)
from lipscope.probes.budget.subject import read_subject
from lipscope.probes.budget.tracing import batches, gradients
from tests.probes.budget.tiny import some_ids, tiny

KINDS = ["bert", "llama", "qwen3", "gpt2"]


def followed(kind, format, attention="eager", n=24, seed=1):
    ids = some_ids(1, n, seed)
    subject = read_subject(tiny(kind, attention), ids, head=False, length=64, samples=1)
    return follow_run(subject, subject.in_dtype(DTYPES[format]), subject.sequences[0])


def test_the_error_of_an_operation_is_what_it_rounded_away():
    trace = RoundingTrace(torch.bfloat16, torch.float64)
    x = torch.randn(50, dtype=torch.bfloat16)
    with trace:
        y = x * 3
    (rounding,) = trace.roundings()
    assert torch.equal(rounding.error, y.double() - x.double() * 3)
    assert torch.equal(rounding.exact.detach(), x.double() * 3)


def test_exact_operations_round_nothing():
    trace = RoundingTrace(torch.bfloat16, torch.float64)
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    with trace:
        y = torch.cat([-x[..., 3:], x[..., :3]], dim=-1).transpose(0, 1).contiguous()
        z = (y.float() * 2).to(torch.bfloat16).abs()
        w = z.view(3, 8).expand(2, 3, 8).clone()
    assert trace.roundings() == []
    assert torch.equal(trace.exact(w), w.double())


def test_results_wider_than_the_format_are_not_rounded():
    trace = RoundingTrace(torch.bfloat16, torch.float64)
    x = torch.randn(50, dtype=torch.bfloat16)
    with trace:
        wide = torch.softmax(x, dim=-1, dtype=torch.float32)
        back = wide.to(torch.bfloat16)
    (rounding,) = trace.roundings()
    assert rounding.kind == "to"
    assert torch.equal(rounding.error, back.double() - wide.double())


def test_whole_numbers_that_become_floating_point_are_rounded():
    """Position 1001 is 1000 in bf16, where neighbours are 4 apart."""
    trace = RoundingTrace(torch.bfloat16, torch.float64)
    with trace:
        low = torch.tensor([1000, 1001]).bfloat16()
    (rounding,) = trace.roundings()
    assert rounding.error.tolist() == [0, -1]
    assert trace.exact(low).tolist() == [1000, 1001]


def test_in_place_operations_are_followed():
    trace = RoundingTrace(torch.bfloat16, torch.float64)
    x, y = torch.randn(2, 50, dtype=torch.bfloat16)
    before = x.double()
    with trace:
        z = x.clone()
        z += y
        z[:3] = y[:3] * 3
    assert torch.equal(trace.exact(z).detach()[3:], (before + y.double())[3:])
    assert torch.equal(trace.exact(z).detach()[:3], y.double()[:3] * 3)
    assert trace.roundings()


@pytest.mark.parametrize("attention", ["eager", "sdpa", "lipscope"])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_operations_add_up_to_the_error_of_the_run(kind, attention):
    """To first order, <v, dy> is the sum of <g, e>: no operation may be missed or counted twice."""
    run = followed(kind, "fp16", attention)
    g = torch.Generator().manual_seed(0)
    for exact, rounded in zip(run.states[1:], run.run[1][1:], strict=True):
        dy = rounded.double() - exact.detach()
        v = torch.randn(3, *dy.shape, generator=g, dtype=torch.float64)
        linear = squared_errors([exact], [v], run.roundings)[1].sum(dim=1)
        assert torch.all((linear - (v * dy).flatten(1).sum(dim=1)).abs() <= 0.05 * dy.norm())


def test_the_reference_is_the_model_in_float64():
    model = tiny("llama")
    ids = some_ids(1, 24)
    subject = read_subject(model, ids, head=False, length=64, samples=1)
    run = follow_run(subject, subject.in_dtype(torch.bfloat16), ids)
    with torch.no_grad(), subject.ready():
        exact = subject.module(ids, output_hidden_states=True).hidden_states
    assert len(run.states) == len(exact)
    for got, right in zip(run.states, exact, strict=True):
        assert (got - right).norm() <= 1e-12 * right.norm()
    low = tiny("llama")
    for p in low.parameters():
        p.data = p.data.bfloat16()
    rounded = low(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(run.run[1], rounded, strict=True))


def test_only_the_rows_of_an_embedding_in_use_are_sites():
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 4))
    subject = read_subject(model, torch.tensor([3, 5, 3]), head=False, length=9, samples=1)
    run = follow_run(subject, subject.in_dtype(torch.bfloat16), subject.sequences[0])
    y = run.output
    v = torch.randn(y.shape, dtype=torch.float64)
    squares = squared_errors([y], [v[None]], run.roundings)[0][0]
    hit = [
        rounding
        for rounding, square in zip(run.roundings, squares, strict=True)
        if square and rounding.kind == WEIGHT
    ]
    assert [tuple(r.exact.shape) for r in hit] == [(4, 8), (4,), (2, 8)]


def test_weights_stored_in_the_format_round_nothing():
    model = tiny("llama").bfloat16()
    subject = read_subject(model, some_ids(1), head=False, length=64, samples=1)
    run = follow_run(subject, subject.in_dtype(torch.bfloat16), subject.sequences[0])
    assert all(not r.error.any() for r in run.roundings if r.kind == WEIGHT)


class Scaled(nn.Module):
    """Sums of positive numbers, each times a weight close to 1."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(60, 256), nn.Linear(256, 8, bias=False)
        self.scale = nn.Parameter(torch.full((256,), 1.0035))  # between 1 and 1.0078 in bfloat16
        for weight in (self.embed.weight, self.out.weight):
            weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))

    def forward(self, ids):
        return self.out(self.embed(ids) * self.scale)


def test_parameters_that_all_round_to_one_have_errors_of_one_sign():
    got = ls.error_budget(Scaled(), some_ids(4, 24), formats="bf16", probes=128, observe=True)
    assert 0.85 <= got.observed["bf16"] / got.total("bf16").value <= 1.15


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 4, 6)])
def test_batch_norm_is_that_of_torch_in_evaluation(shape, affine):
    g = torch.Generator().manual_seed(0)
    x, weight, bias, mean = (
        torch.randn(size, generator=g, dtype=torch.float64) for size in (shape, 3, 3, 3)
    )
    var = torch.rand(3, generator=g, dtype=torch.float64)
    given = [p if has else None for p, has in zip((weight, bias), affine, strict=True)]
    truth = torch.nn.functional.batch_norm(x, mean, var, *given, False, 0.1, 1e-3)
    norm = FIXED_NORMS[nn.functional.batch_norm]
    torch.testing.assert_close(norm(x, mean, var, *given, False, 0.1, 1e-3), truth)


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
