"""Token attacks on a number whose best text is known: they find it, and report what is measured."""

import math
import time
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from lipscope._types import UserError
from lipscope.attack.tokens import (
    TextTarget,
    duplicated_tokens,
    guided_swaps,
    projected_swaps,
    random_swaps,
    search_until,
)

V, D, N = 12, 5, 6


def target(seed: int = 0) -> TextTarget:
    """sum_i <w_i, e_i> + |sum_i e_i|^2 / 8: positions matter, and tokens matter to each other."""
    g = torch.Generator().manual_seed(seed)
    embedding = torch.randn(V, D, generator=g, dtype=torch.float64)
    w = torch.randn(N, D, generator=g, dtype=torch.float64)

    def value(E):
        return 20 + (w * E).sum(dim=(-2, -1)) + E.sum(dim=-2).square().sum(dim=-1) / 8

    def slope(E):
        E = E.clone().requires_grad_(True)
        y = value(E)
        return y.item(), torch.autograd.grad(y, E)[0]

    return TextTarget(lambda ids: value(embedding[ids]), slope, embedding)


IDS = [0, 1, 2, 3, 4, 5]


def best_by_force(t: TextTarget, swaps: int) -> float:
    texts = []
    for places in combinations(range(N), swaps):
        for words in product(range(V), repeat=swaps):
            text = torch.tensor(IDS)
            text[list(places)] = torch.tensor(words)
            texts.append(text)
    return t.measure(torch.stack(texts)).max().item()


@pytest.mark.parametrize("seed", range(4))
def test_one_guided_swap_is_the_best_there_is(seed, monkeypatch):
    monkeypatch.setattr("lipscope.attack.tokens.PER_POSITION", V)
    t = target(seed)
    found = guided_swaps(t, IDS, 1, width=3 * N * V)
    assert found.value == pytest.approx(best_by_force(t, 1)) and len(found.positions) == 1


def test_a_linear_number_needs_no_more_than_its_first_order_scores():
    g = torch.Generator().manual_seed(0)
    embedding, w = (torch.randn(rows, D, generator=g, dtype=torch.float64) for rows in (500, N))
    t = TextTarget(
        lambda ids: 50 + (w * embedding[ids]).sum(dim=(-2, -1)),
        lambda E: (50 + (w * E).sum().item(), w),
        embedding,
    )
    found = guided_swaps(t, IDS, 3, width=12, sweeps=0)
    gains = (w @ embedding.T).amax(dim=1) - (w * embedding[IDS]).sum(dim=1)
    assert found.value == pytest.approx(found.before + gains.topk(3).values.sum().item())
    assert found.measured <= 1 + 3 * 3 * 12


@pytest.mark.wide
def test_guided_swaps_find_the_best_pair_and_beat_random_ones():
    reached = []
    for seed in range(20):
        t = target(seed)
        found, best = guided_swaps(t, IDS, 2), best_by_force(t, 2)
        reached.append(found.value / best)
        assert found.measured < 260  # of 2160 pairs
        assert found.value >= random_swaps(t, IDS, 2, tries=found.measured, seed=seed + 1).value
    assert min(reached) >= 0.97 and sum(share > 1 - 1e-9 for share in reached) >= 19


@pytest.mark.parametrize("attack", [guided_swaps, duplicated_tokens, projected_swaps, random_swaps])
@pytest.mark.parametrize("swaps", [1, 3])
def test_every_attack_changes_at_most_its_swaps_and_reports_what_is_measured(attack, swaps):
    t = target(7)
    found = attack(t, IDS, swaps)
    assert len(found.positions) <= swaps
    assert [i for i in range(N) if found.ids[i] != IDS[i]] == list(found.positions)
    assert found.value == pytest.approx(t.measure(torch.tensor([found.ids]))[0].item())
    assert found.before == pytest.approx(t.measure(torch.tensor([IDS]))[0].item())
    assert found.factor == pytest.approx(found.value / found.before) and found.measured > 1


def test_duplicates_are_tokens_of_the_text():
    found = duplicated_tokens(target(3), IDS, 3)
    assert set(found.ids) <= set(IDS) and found.value >= found.before


def test_only_the_vocabulary_given_is_used():
    t = replace(target(4), vocabulary=torch.tensor([8, 9]))
    for attack in (guided_swaps, random_swaps, projected_swaps):
        found = attack(t, IDS, 2)
        assert {found.ids[i] for i in found.positions} <= {8, 9}


@pytest.mark.parametrize("swaps", [1, 2, 4])
def test_projection_moves_the_tokens_of_steepest_slope(swaps):
    g = torch.Generator().manual_seed(6)
    embedding, w = (torch.randn(rows, D, generator=g, dtype=torch.float64) for rows in (V, N))
    steepness = torch.tensor([3.0, 0.1, 5.0, 0.2, 4.0, 2.0], dtype=torch.float64)
    w = steepness[:, None] * w / w.norm(dim=1, keepdim=True)
    t = TextTarget(
        lambda ids: 50 + (w * embedding[ids]).sum(dim=(-2, -1)),
        lambda E: (50 + (w * E).sum().item(), w),
        embedding,
        vocabulary=torch.arange(N, V),  # no token of the text: whatever moves becomes another
    )
    found = projected_swaps(t, IDS, swaps)
    assert list(found.positions) == sorted(steepness.topk(swaps).indices.tolist())


@pytest.mark.parametrize("attack", [guided_swaps, duplicated_tokens, projected_swaps, random_swaps])
def test_bad_input_is_refused(attack):
    with pytest.raises(UserError, match="cannot replace 7 of the 6 tokens"):
        attack(target(), IDS, 7)
    with pytest.raises(UserError, match="cannot replace 0"):
        attack(target(), IDS, 0)
    with pytest.raises(UserError, match="token id 12 has no row in the embedding of 12"):
        attack(target(), [0, 12], 1)


def test_a_vocabulary_beyond_the_embedding_is_refused():
    with pytest.raises(UserError, match="different vocabularies"):
        guided_swaps(replace(target(), vocabulary=torch.tensor([3, 40])), IDS, 1)


def test_a_search_without_a_limit_is_the_search_itself():
    seen = []
    found, interrupted = search_until(
        lambda t, ids: guided_swaps(t, ids, 2), target(), IDS, report=seen.append
    )
    assert found == guided_swaps(target(), IDS, 2) and not interrupted
    assert seen == sorted(seen) and seen[-1] == found.measured and len(seen) > 10


def slow(seconds: float):
    """A target whose every measurement is one step that takes this long, in many products."""
    t = target()

    def measure(texts):
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            with torch.no_grad():
                torch.eye(2) @ torch.eye(2)
        return t.measure(texts)

    return type(t)(measure, t.slope, t.embedding)


@pytest.mark.parametrize(("step", "texts"), [(0.05, 17), (60.0, None)])
def test_the_time_is_kept_also_within_a_step(step, texts):
    start = time.monotonic()
    found, interrupted = search_until(
        lambda t, ids: random_swaps(t, ids, 2, tries=1000), slow(step), IDS, until=start + 1.0
    )
    assert time.monotonic() - start < 3.0 and not interrupted
    assert torch.is_grad_enabled()
    if texts is None:
        assert found is None  # not even the original text was measured
    else:
        assert found.stopped and texts <= found.measured < 1000
        assert found.value == target().measure(torch.tensor([found.ids])).item() >= found.before


def test_ctrl_c_keeps_the_best_text():
    t, calls = target(), []

    def measure(texts):
        calls.append(texts)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return t.measure(texts)

    found, interrupted = search_until(
        lambda t, ids: random_swaps(t, ids, 2, tries=100),
        type(t)(measure, t.slope, t.embedding),
        IDS,
    )
    values = torch.cat([t.measure(texts) for texts in calls[:3]])
    assert interrupted and found.stopped and found.measured == len(values) == 33
    assert found.value == values.max().item() and found.before == values[0].item()
    assert not math.isnan(found.factor)
