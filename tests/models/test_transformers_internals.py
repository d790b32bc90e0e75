"""The private interfaces of transformers still mean what models takes them for."""

import torch
from transformers import LlamaConfig, LlamaModel

from lipscope.models._transformers_internals import (
    ATTENTION,
    EXPERTS,
    attention_in_force,
    random_model,
)
from tests.models.zoo import FAMILIES


def test_the_names_under_which_a_configuration_keeps_its_choices():
    config = LlamaConfig(**FAMILIES["llama"].options)
    assert ATTENTION in vars(config) and EXPERTS in vars(config)
    vars(config)[ATTENTION] = "somebody's"
    assert attention_in_force(config) == "somebody's"


def test_a_random_model_is_float32_and_eager_whatever_its_configuration_says():
    config = LlamaConfig(**FAMILIES["llama"].options, dtype="bfloat16")
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = random_model(LlamaModel, config)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert attention_in_force(model.config) == "eager"
