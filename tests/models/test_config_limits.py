"""Numbers that no model can mean are refused before they cost memory or time."""

import json
import time

import pytest
import torch
from transformers import GPT2Config, GPT2Model, T5Config, T5Model

from lipscope._types import UserError
from lipscope.models import model_files
from lipscope.models._transformers_internals import CONFIG_MAPPING
from lipscope.models.loading import load
from lipscope.models.model_files import check_numbers, check_size
from tests.models.test_loading import edit
from tests.models.zoo import FAMILIES, make

SIZES = {
    "n_layer": 2048,
    "num_hidden_layers": 2048,
    "num_attention_heads": 1 << 14,
    "num_local_experts": 1 << 20,
    "num_labels": 1 << 20,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 26,
    "hidden_size": 1 << 24,
}


@pytest.mark.parametrize("key", SIZES)
def test_each_size_has_a_range_at_any_depth(key):
    limit = SIZES[key]
    for wrap in (lambda c: c, lambda c: {"text_config": c}, lambda c: {"parts": [c]}):
        check_numbers(wrap({key: limit}), "it")
        for value in (limit + 1, -limit - 1, 10**30):
            with pytest.raises(UserError, match=rf"it: {key} is .*outside -{limit} to {limit}"):
                check_numbers(wrap({key: value}), "it")


def test_what_may_be_large_stays():
    check_numbers({"rope_theta": 10**12, "max_length": 10**30, "limit": [0.0, float("inf")]}, "it")


@pytest.mark.slow
def test_the_defaults_of_every_architecture_are_within_range():
    checked, without_defaults = 0, []
    for name in CONFIG_MAPPING:
        try:
            raw = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
        except Exception:  # some need arguments, such as the configurations of their parts
            without_defaults.append(name)
            continue
        check_numbers(raw, name)
        checked += 1
    assert checked >= 0.95 * len(CONFIG_MAPPING), without_defaults


@pytest.mark.parametrize("random_init", [None, 0])
@pytest.mark.parametrize(
    "change",
    [
        {"n_layer": 10**9},
        {"num_labels": 10**9},
        {"n_embd": 1 << 23, "n_head": 1},
        {"vocab_size": 1 << 24, "n_embd": 1 << 15},
        {"n_positions": 1 << 26, "n_embd": 1 << 13},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_folder_with_huge_sizes_is_refused_at_once(change, random_init, tmp_path):
    make("gpt2").save_pretrained(tmp_path)
    edit(tmp_path, **change)
    started = time.process_time()
    with pytest.raises(UserError, match=r"outside|need more than the"):
        load(str(tmp_path), random_init=random_init)
    assert time.process_time() - started < 5


def test_the_number_of_weights_is_that_of_the_model():
    config = GPT2Config(**FAMILIES["gpt2"].options)
    expected = sum(p.numel() for p in GPT2Model(config).parameters())
    assert check_size(GPT2Model, config, "it", 4) == expected
    shared = T5Config(**FAMILIES["t5"].options)
    assert check_size(T5Model, shared, "it", 4) == sum(
        p.numel() for p in T5Model(shared).parameters()
    )


def test_memory_and_time_are_limits_of_the_construction(monkeypatch):
    config = GPT2Config(**FAMILIES["gpt2"].options)
    state = torch.random.get_rng_state()
    monkeypatch.setattr(model_files, "memory_here", lambda: 5000)
    with pytest.raises(UserError, match=r"need more than the 4.88 KiB of memory here"):
        check_size(GPT2Model, config, "it", 4)
    monkeypatch.undo()
    monkeypatch.setattr(model_files, "SECONDS", -1.0)
    with pytest.raises(UserError, match=r"check the sizes in config.json"):
        check_size(GPT2Model, config, "it", 4)
    monkeypatch.undo()
    assert torch.equal(torch.random.get_rng_state(), state)
    GPT2Model(config)  # no limit is left behind


def test_files_that_hold_far_fewer_weights_than_described_are_refused(tmp_path):
    make("gpt2").save_pretrained(tmp_path)
    edit(tmp_path, vocab_size=10**5)
    with pytest.raises(UserError, match=r"weights in its files.*they do not belong together"):
        load(str(tmp_path))
