"""Proposed checks: bounds on implementations, attacks at equal norm, long contexts."""

import pytest

from lipscope.papers import castin_checks
from lipscope.papers.castin_checks import (
    COPY,
    GRADIENT,
    GUIDED,
    RANDOM,
    STATES,
    SWAP,
    judge_attacks,
    judge_implementations,
    judge_long,
    run_implementations,
    run_long,
    wilson,
)
from lipscope.papers.claims import QUOTED, Kind
from lipscope.papers.setting import Setting


def test_wilsons_interval_against_its_equation():
    # Wilson's ends solve (p - rate)^2 = z^2 rate (1 - rate) / n.
    for won, tried in ((0, 6), (3, 10), (59, 60)):
        for rate in wilson(won, tried):
            left, right = (won / tried - rate) ** 2, 1.96**2 * rate * (1 - rate) / tried
            assert left == pytest.approx(right, abs=1e-12)


@pytest.mark.wide
def test_bounds_on_implementations_hold_and_a_broken_one_is_reported(monkeypatch):
    few = {name: castin_checks.ARCHITECTURES[name] for name in ("GPT-2", "Llama")}
    monkeypatch.setattr(castin_checks, "ARCHITECTURES", few)
    monkeypatch.setattr(
        castin_checks, "load", lambda source: Setting().from_config(few["GPT-2"], 1)
    )
    numbers = run_implementations(Setting(quick=True))
    assert judge_implementations(numbers, QUOTED["N1"]).holds
    assert {r["model"] for r in numbers["rows"]} == {"all-MiniLM-L6-v2", "GPT-2", "Llama"}
    assert any(r["paper"] is None for r in numbers["rows"])  # not for rotary positions
    numbers["rows"][0]["broken"] = ["compact"]
    assert not judge_implementations(numbers, QUOTED["N1"]).holds


def attacked(guided, random):
    rows = [
        {"attack": name, "share": 1.0, "success": i < won}
        for name, won in ((GUIDED, guided), (STATES, 0), (GRADIENT, 20), (RANDOM, random))
        for i in range(20)
    ]
    rows += [{"attack": name, "share": 1.0, "success": False} for name in (SWAP, COPY)]
    return {"rows": rows, "classes": 4, "accuracy": 0.9}


def test_a_guided_attack_must_beat_a_random_one_beyond_chance():
    assert judge_attacks(attacked(15, 1), QUOTED["N2"]).holds
    close = judge_attacks(attacked(5, 3), QUOTED["N2"])
    assert not close.holds and "overlap" in close.reason


def test_a_processor_alone_needs_a_gpu_and_says_how_far_it_came(monkeypatch):
    small = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(castin_checks, "LLAMA", castin_checks.LLAMA | small)
    verdict = judge_long(run_long(Setting(quick=True)), QUOTED["S11"])
    assert verdict.kind is Kind.NEEDS and "n = 512" in verdict.reason
    rows = [{"n": n, "sigma": 2.0, "lower": 1.9, "upper": 2.1} for n in (1024, 16384, 131072)]
    long = judge_long({"rows": rows}, QUOTED["S11"])
    assert long.kind is Kind.REPRODUCED and long.interval == (1.9, 2.1)
