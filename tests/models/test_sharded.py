"""Blocks of models on two ranks against one process; what does not act token by token is refused.

The processes run once, in tests/models/two_ranks.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.once import once

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    def run(place):
        command = [sys.executable, "-m", "tests.models.two_ranks", str(place / "found")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]

    place = once(tmp_path_factory, "two ranks", run)
    zero, one = (torch.load(place / f"found.{rank}", weights_only=False) for rank in (0, 1))
    assert zero.keys() == one.keys()
    return zero


EVERYWHERE = ["heads", "attention", "residual", "block"]


@pytest.mark.wide
@pytest.mark.parametrize("scope", [*EVERYWHERE, "normed"])
@pytest.mark.parametrize("name", ["Llama", "BERT", "Gemma 2"])
def test_two_ranks_give_the_numbers_of_one_process(found, name, scope):
    if (name, scope) == ("BERT", "normed"):
        assert (name, scope) not in found
        return
    case = found[name, scope]
    (value, lower, upper, status), (v, low, up, s) = case["plain"], case["ranks"]
    assert status == s
    assert torch.allclose(v, value, rtol=1e-12) and torch.allclose(low, lower, rtol=1e-9)
    # The largest singular values of BERT's block are close to each other, which rounding mixes.
    assert torch.allclose(up, upper, rtol=1e-3)
    assert (case["right"][0] - case["right"][1]).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("name", "scope", "said"),
    [
        ("T5", "heads", "f is Heads, which is not known to act token by token"),
        ("T5", "attention", "T5Attention makes a mask or bias of its own from the tokens"),
        ("T5, second layer", "block", "T5Block takes an argument of shape (1, 2, 7, 7)"),
        ("T5", "block", "T5Attention makes a mask or bias of its own from the tokens"),
        ("Llama", "suffix", "scopes suffix and model run LlamaModel from its inputs on"),
        (
            "mixing",
            "block",
            "LlamaDecoderLayer does not act token by token outside of its attention",
        ),
    ],
)
def test_what_is_not_token_by_token_is_refused_by_name(found, name, scope, said):
    assert said in found[name, scope]


def test_the_attention_of_a_mixing_block_is_still_measured(found):
    for scope in ("heads", "attention", "residual"):
        assert isinstance(found["mixing", scope], dict)
