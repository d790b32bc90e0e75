"""Tiny models with structure in their weights, for the tests of budgets."""

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3Config,
    Qwen3Model,
)

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {
    "vocab_size": 60,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "bert": (BertModel, BertConfig, SIZES),
    "llama": (LlamaModel, LlamaConfig, GROUPED),
    "llama_lm": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "qwen3": (Qwen3Model, Qwen3Config, GROUPED),
    "gpt2": (GPT2Model, GPT2Config, GPT2),
    "gpt2_lm": (GPT2LMHeadModel, GPT2Config, GPT2),
}


def tiny(kind: str, attention: str = "eager", seed: int = 0) -> nn.Module:
    """A model whose matrices are large enough for its layers to matter."""
    model_class, config_class, options = KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**options)).eval()
    model.config._attn_implementation = attention
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data *= 3
        elif name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def some_ids(rows: int = 2, n: int = 20, seed: int = 1) -> torch.Tensor:
    return torch.randint(60, (rows, n), generator=torch.Generator().manual_seed(seed))
