"""Watched layers: their map at the tokens they read, for all masks, arguments and wrappers."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lipscope.nn.attention_layer import CosineSelfAttention, DotSelfAttention
from lipscope.nn.contractive import ContractiveL2Attention
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.train.monitor import SmoothnessMonitor, SmoothnessWarning
from tests.train.watched import DIM, HEADS, TOKENS, batches, dense_norm


@pytest.mark.parametrize(
    "make",
    [
        lambda: DotSelfAttention(DIM, HEADS, causal=True),
        lambda: DotSelfAttention(DIM, HEADS, qk_norm=True),
        lambda: L2SelfAttention(DIM, HEADS),
        lambda: ContractiveL2Attention(DIM, HEADS, 0.5),
        lambda: CosineSelfAttention(DIM, HEADS),
        lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 5), nn.GELU()),
    ],
    ids=["dot", "qk_norm", "l2", "contractive", "cosine", "any module"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_constant_is_that_of_the_dense_jacobian_at_the_present_weights(make, dtype):
    torch.manual_seed(1)
    model = nn.Sequential(make()).to(dtype)
    monitor = SmoothnessMonitor(model, ["0"], every=1, tol=1e-5)
    for X in batches(2, dtype=dtype):
        model(X)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        (reading,) = monitor.step()
        truth = dense_norm(copy.deepcopy(model).double(), X[0])
        assert reading.sigma == pytest.approx(truth, rel=1e-9 if dtype == torch.float64 else 2e-6)
        assert (
            reading.residual <= 1e-4
            and reading.tokens == TOKENS
            and reading.status in ("converged", "resolution")
        )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, "causal", "boolean", "per head"])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_attention_with_masks_and_padding(batch_first, mask, padded):
    torch.manual_seed(2)
    model = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
    X = batches(1)[0]
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    given = {
        None: None,
        "causal": torch.zeros(TOKENS, TOKENS).masked_fill(hidden, -math.inf),
        "boolean": hidden,
        "per head": hidden.expand(3 * HEADS, -1, -1),
    }[mask]
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[0, 4:] = padded
    if mask == "causal":
        padding = torch.zeros(3, TOKENS).masked_fill(padding, -math.inf)
    monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
    tokens = X if batch_first else X.transpose(0, 1)
    model(tokens, tokens, tokens, key_padding_mask=padding if padded else None, attn_mask=given)
    (reading,) = monitor.step()

    n = 4 if padded else TOKENS
    exact = copy.deepcopy(model).double().eval()
    exact.batch_first = True

    def f(x):
        return exact(x[None], x[None], x[None], attn_mask=None if mask is None else hidden[:n, :n])[
            0
        ][0]

    assert reading.sigma == pytest.approx(dense_norm(f, X[0, :n]), rel=2e-6)
    assert reading.tokens == n


def test_a_layer_with_more_arguments_is_measured_with_its_own_sample_of_them():
    torch.manual_seed(3)
    model = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.1, batch_first=True)
    X = batches(1)[0]
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[0, 4:] = True
    monitor = SmoothnessMonitor(model, [model], every=1, tol=1e-5)
    model(X, src_key_padding_mask=padding)
    (reading,) = monitor.step()
    exact = copy.deepcopy(model).double().eval()
    truth = dense_norm(lambda x: exact(x[None], src_key_padding_mask=padding[:1])[0], X[0])
    assert reading.sigma == pytest.approx(truth, rel=2e-6) and reading.tokens == TOKENS


class Shared(nn.Module):
    """One layer at two depths, whose calls are run again in the backward pass, the second first."""

    def __init__(self, again) -> None:
        super().__init__()
        self.layer, self.again, self.seen = DotSelfAttention(DIM, HEADS), again, []

    def forward(self, X):
        for _ in range(2):
            self.seen.append(X[0].detach())
            X = X + self.again(self.layer, X)
        return X


@pytest.mark.parametrize(
    "again",
    [
        lambda f, X: f(X),
        lambda f, X: checkpoint(f, X, use_reentrant=False),
        lambda f, X: checkpoint(f, X, use_reentrant=True),
    ],
    ids=["plain", "checkpoint", "reentrant checkpoint"],
)
def test_a_layer_that_runs_several_times_is_measured_at_its_last_call_in_the_forward_pass(again):
    torch.manual_seed(6)
    model = Shared(again)
    monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
    model(batches(1)[0].requires_grad_()).square().sum().backward()
    (reading,) = monitor.step()
    first, last = (dense_norm(copy.deepcopy(model.layer).double(), X) for X in model.seen)
    assert reading.sigma == pytest.approx(last, rel=2e-6) and abs(first - last) > 1e-3 * last


@pytest.mark.wide
def test_it_works_under_no_grad_inference_mode_and_autocast():
    model = nn.Sequential(CosineSelfAttention(DIM, HEADS), DotSelfAttention(DIM, HEADS))
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
        for X in batches(2):
            with context:
                y = model[0](X)
                model[1](y)
                readings = monitor.step()
            truth = dense_norm(copy.deepcopy(model[0]).double(), X[0].clone())
            assert readings[0].sigma == pytest.approx(truth, rel=2e-6)


def test_a_layer_it_cannot_measure_is_named_once_and_the_rest_goes_on():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
            self.own = DotSelfAttention(DIM, HEADS)
            self.failing = Failing()

        def forward(self, X):
            return self.own(X) + self.cross(X, X + 1, X + 1)[0] + self.failing(X)

    class Failing(nn.Module):
        def forward(self, X):
            if not self.training:
                raise RuntimeError(f"not enough memory for {X.sum()}")
            return X

    model = Two()
    monitor = SmoothnessMonitor(model, ["cross", "own", "failing"], every=1)
    with pytest.warns(SmoothnessWarning) as caught:
        for X in batches(3):
            model(X)
            readings = monitor.step()
            assert [math.isnan(r.sigma) for r in readings] == [True, False, True]
            assert "not enough memory" in readings[2].status
    first, second = (str(warning.message) for warning in caught)
    assert (
        "no readings of cross" in first
        and "a key or value other" in first
        and "no readings of failing" in second
    )


def test_patterns_choose_layers():
    model = nn.Sequential(*(DotSelfAttention(DIM, HEADS) for _ in range(3)))
    assert SmoothnessMonitor(model, ["[02]"]).watch.names == ("0", "2")
    assert SmoothnessMonitor(model, [model[1]]).watch.names == ("1",)
    assert SmoothnessMonitor(model).watch.names == ("0", "1", "2")


def test_a_batch_as_large_as_its_sequences_is_ambiguous_only_where_it_matters():
    model = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True)
    X = torch.randn(TOKENS, TOKENS, DIM)
    monitor = SmoothnessMonitor(model, [model], every=1)
    model(X)
    assert monitor.step()[0].sigma > 0
    model(X, src_mask=torch.zeros(TOKENS, TOKENS))
    with pytest.warns(SmoothnessWarning, match="one row per sample or one per token"):
        monitor.step()
