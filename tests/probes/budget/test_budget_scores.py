"""Scores against the truth, and against their definitions on a single layer."""

import math

import pytest
import torch
from torch import nn

from benchmarks.budget_scores import compare_scores
from lipscope.probes.budget.formats import read_format
from tests.probes.budget.tiny import some_ids, tiny


def test_scores_of_one_linear_layer_are_their_definitions():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 6, bias=False)).double()
    ids = torch.arange(30)
    table = compare_scores(layer, ids, formats="int4:12", probes=1000)
    (scores,) = table.values["int4:12"].values()
    x, W = layer[0].weight[:30].detach(), layer[1].weight.detach()
    dW = read_format("int4:12").weight(W) - W
    truth = ((x @ dW.T).norm() / (x @ W.T).norm()).item()
    assert math.isclose(scores["truth"], truth, rel_tol=1e-9)
    assert math.isclose(scores["weight error"], (dW.norm() / W.norm()).item(), rel_tol=1e-9)
    assert math.isclose(scores["local output error"], truth, rel_tol=1e-9)
    # Nothing follows the layer: sigma is 1, and so is the Frobenius norm per entry.
    assert math.isclose(scores["sigma"], truth, rel_tol=1e-3)
    for name in ("Frobenius", "diagonal", "budget"):
        assert math.isclose(scores[name], truth, rel_tol=0.1), name
    # E |g_W|^2 per entry is |x|^2 per input.
    trace = x.norm() * dW.norm() / math.sqrt(12) / (x @ W.T).norm()
    assert math.isclose(scores["trace"], trace.item(), rel_tol=0.1)


@pytest.mark.wide
def test_the_budget_ranks_layers_and_heads_right():
    table = compare_scores(
        tiny("llama"), some_ids(2, 16), formats="int8,kv4", probes=48, sigma=False
    )
    ranks = {(row.format, row.score): row for row in table.rows}
    for name in ("int8", "kv4"):
        row = ranks[name, "budget"]
        assert row.rank >= 0.85 and 0.85 <= row.scale <= 1.15
    assert ("kv4", "low entropy") in ranks and "budget" in str(table)
