"""Tiny random models of every family that is promised to work, and where each keeps its parts."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

TEXT = {
    "vocab_size": 50,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
ROPE = {**TEXT, "num_key_value_heads": 1, "head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "block": "layers.{}",
    "core": "layers.{}.self_attn",
    "projection": "layers.{}.self_attn.o_proj",
    "residual": ("layers.{}.post_attention_layernorm", "input"),
}
BERT = {
    "block": "encoder.layer.{}",
    "core": "encoder.layer.{}.attention.self",
    "projection": "encoder.layer.{}.attention.output.dense",
    "residual": ("encoder.layer.{}.attention", "output"),
}


@dataclass(frozen=True)
class Family:
    """An architecture: how to make a tiny one, and the paths in its trunk of the parts at layer {}.

    closed:  whether its attention modules are plain self-attention
    prenorm: whether it has the scope normed
    shared:  whether one block serves all layers
    """

    model: str
    config: str
    options: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    closed: bool = True
    prenorm: bool = True
    shared: bool = False
    head_size: int = 4


FAMILIES = {
    "bert": Family("BertModel", "BertConfig", TEXT, BERT, prenorm=False),
    "roberta": Family(
        "RobertaModel", "RobertaConfig", {**TEXT, "pad_token_id": 1}, BERT, prenorm=False
    ),
    "distilbert": Family(
        "DistilBertModel",
        "DistilBertConfig",
        {
            "vocab_size": 50,
            "dim": 8,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 12,
            "max_position_embeddings": 40,
        },
        {
            "block": "transformer.layer.{}",
            "core": "transformer.layer.{}.attention",
            "projection": "transformer.layer.{}.attention.out_lin",
            "residual": ("transformer.layer.{}.sa_layer_norm", "output"),
        },
        prenorm=False,
    ),
    "albert": Family(
        "AlbertModel",
        "AlbertConfig",
        {**TEXT, "embedding_size": 6},
        {
            "block": "encoder.albert_layer_groups.0",
            "core": "encoder.albert_layer_groups.0.albert_layers.0.attention",
            "projection": "encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
            "residual": ("encoder.albert_layer_groups.0.albert_layers.0.attention", "output"),
        },
        prenorm=False,
        shared=True,
    ),
    "gpt2": Family(
        "GPT2Model",
        "GPT2Config",
        {
            "vocab_size": 50,
            "n_embd": 8,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 40,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {
            "block": "h.{}",
            "core": "h.{}.attn",
            "projection": "h.{}.attn.c_proj",
            "residual": ("h.{}.ln_2", "input"),
        },
    ),
    "llama": Family("LlamaModel", "LlamaConfig", {**ROPE, "attention_bias": True}, LLAMA),
    "mistral": Family("MistralModel", "MistralConfig", {**ROPE, "sliding_window": 3}, LLAMA),
    "qwen3": Family("Qwen3Model", "Qwen3Config", ROPE, LLAMA, closed=False),
    "gemma2": Family(
        "Gemma2Model",
        "Gemma2Config",
        {**ROPE, "sliding_window": 3, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
        {**LLAMA, "residual": ("layers.{}.pre_feedforward_layernorm", "input")},
    ),
    "gpt_oss": Family(
        "GptOssModel",
        "GptOssConfig",
        {**ROPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
        LLAMA,
    ),
    "t5": Family(
        "T5EncoderModel",
        "T5Config",
        {"vocab_size": 50, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2},
        {
            "block": "encoder.block.{}",
            "core": "encoder.block.{}.layer.0.SelfAttention",
            "projection": "encoder.block.{}.layer.0.SelfAttention.o",
            "residual": ("encoder.block.{}.layer.0", "output"),
        },
        closed=False,
    ),
    "vit": Family(
        "ViTModel",
        "ViTConfig",
        {
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 12,
            "image_size": 8,
            "patch_size": 4,
        },
        {
            "block": "layers.{}",
            "core": "layers.{}.attention",
            "projection": "layers.{}.attention.o_proj",
            "residual": ("layers.{}.layernorm_after", "input"),
        },
    ),
    "cohere": Family(
        "CohereModel",
        "CohereConfig",
        ROPE,
        {
            "block": "layers.{}",
            "core": "layers.{}.self_attn",
            "projection": "layers.{}.self_attn.o_proj",
            "residual": None,
        },
    ),
    "gpt_neox": Family(
        "GPTNeoXModel",
        "GPTNeoXConfig",
        {
            **TEXT,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rotary_pct": 0.5,
        },
        {
            "block": "layers.{}",
            "core": "layers.{}.attention",
            "projection": "layers.{}.attention.dense",
            "residual": None,
        },
        head_size=8,
    ),
    "glm": Family("GlmModel", "GlmConfig", {**ROPE, "head_dim": 8}, LLAMA, head_size=8),
    "opt": Family(
        "OPTModel",
        "OPTConfig",
        {
            "vocab_size": 50,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 12,
            "max_position_embeddings": 40,
            "word_embed_proj_dim": 8,
            "pad_token_id": 1,
        },
        {
            "block": "decoder.layers.{}",
            "core": "decoder.layers.{}.self_attn",
            "projection": "decoder.layers.{}.self_attn.out_proj",
            "residual": ("decoder.layers.{}.final_layer_norm", "input"),
        },
    ),
    "olmo2": Family(
        "Olmo2Model",
        "Olmo2Config",
        {**ROPE, "head_dim": None},
        {**LLAMA, "residual": ("layers.{}.mlp", "input")},
        closed=False,
        prenorm=False,
    ),
}

BYPASSING = {
    "gpt_neo": Family(
        "GPTNeoModel",
        "GPTNeoConfig",
        {
            "vocab_size": 50,
            "hidden_size": 8,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 12,
            "max_position_embeddings": 40,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {"block": "h.{}"},
    ),
    "falcon": Family(
        "FalconModel",
        "FalconConfig",
        {
            "vocab_size": 50,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "alibi": True,
        },
        {"block": "h.{}"},
    ),
}

# Models on lipscope's attention whose attention modules are no maps of one sequence of tokens.
ENTANGLED = {
    "diffllama": Family("DiffLlamaModel", "DiffLlamaConfig", {**ROPE, "num_key_value_heads": 2}),
    "mobilebert": Family(
        "MobileBertModel",
        "MobileBertConfig",
        {
            **TEXT,
            "embedding_size": 8,
            "true_hidden_size": 8,
            "intra_bottleneck_size": 8,
            "num_feedforward_networks": 1,
        },
    ),
}

# Models whose masks depend on their input, which takes their attention out of reach.
MASKING = {"doge": Family("DogeModel", "DogeConfig", ROPE)}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny float32 model with weights large enough to matter, including biases and sinks."""
    family = {**FAMILIES, **BYPASSING, **ENTANGLED, **MASKING}[name]
    options = {key: value for key, value in family.options.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.model)(
            getattr(transformers, family.config)(**copy.deepcopy(options))
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def sample(name: str, batch: int = 2, n: int = 5) -> dict[str, Any]:
    """A random input, by the name the model takes it under."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {
            "pixel_values": torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64)
        }
    return {"input_ids": torch.randint(3, 50, (batch, n), generator=generator)}
