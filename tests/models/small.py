"""Small configurations of any architecture of transformers, by the names of their entries."""

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from transformers import PretrainedConfig

WIDTHS = (8, 32, 48)
"""The sizes below that may grow together."""

SIZES: tuple[tuple[str, Any], ...] = (
    (r"^(num_labels|num_choices)$", 2),
    (r"^(num_key_value_heads|n_head_kv|num_kv_heads|multi_query_group_num)$", 2),
    (r"(^|_)(?<!extract_)(layers?|n_layer|num_blocks|depth)$", 2),
    (r"experts_per_tok|top_?k$|n_group$|topk_group$", 1),
    (r"(num|n)_.*experts$|moe_num_experts|^num_experts", 2),
    (r"head_dim$|dim_head$|kv_channels|d_kv$|qk_\w*_dim$|v_head_dim$|attention_head_size", 8),
    (r"rotary_dim$", 8),
    (r"lora_rank$|mamba_d_head$", 16),
    (r"(attention|self|query)?_?heads?$|n_head$", 4),
    (r"intermediate|ffn|mlp_dim|d_ff$|inner_dim|d_inner|encoder_hid|n_inner", 48),
    (r"^(vocab_size|\w*_vocab_size|n_vocab)$", 99),
    (r"max_position|n_positions|max_(source|target)_positions|n_ctx|max_seq|seq_length", 64),
    (r"image_size$|input_size$", 32),
    (r"patch_size$", 8),
    (r"hash_\w*vocab|hash_size", 50),
    (r"hidden_size$|hidden_dim$|d_model$|n_embd$|embed_dim$|^dim$|emb_dim$|width$|model_dim", 32),
    (r"embedding_size$|projection_dim$|embedding_dim$|out_dim$|output_dim$|feat_dim$", 32),
    (r"codebook_size$|num_codebooks$", 4),
    (r"sliding_window$|window_size$|chunk_size$|attention_window$", 4),
    (r"num_mel_bins$|num_buckets$", 16),
)
"""What an integer becomes, by the first name that matches; entries without a match stay."""


PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
DERIVED = ("out_features", "out_indices", "stage_names", "per_layer_config", "layer_types")
"""Entries that follow from the sizes, and no longer fit once those are small."""


def shrunk(config: Any, key: str = "", scale: int = 1) -> Any:
    """The configuration, as nested dictionaries, with small sizes and token ids."""
    if isinstance(config, dict):
        small = {name: shrunk(value, str(name), scale) for name, value in config.items()}
        if small.get("vocab_size", 0) is None:
            small["vocab_size"] = 99
        layers = [small.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers")]
        count = next((n for n in layers if isinstance(n, int)), None)
        for name in PER_LAYER:
            if count is not None and isinstance(small.get(name), list):
                # The last kinds, so that a hybrid keeps one layer that attends.
                small[name] = small[name][-count:]
        return small
    if isinstance(config, bool) or config is None:
        return config
    if isinstance(config, list | tuple):
        return [shrunk(value, key.rstrip("s"), scale) for value in config]
    if isinstance(config, int):
        if key.endswith(("token_id", "token_index", "token_ids")):
            return min(config, 3) if config >= 0 else config
        for words, size in SIZES:
            if re.search(words, key):
                return min(config, size * (scale if size in WIDTHS else 1))
    return config


def small_configs(kind: type[PretrainedConfig]) -> Iterator[PretrainedConfig]:
    """Small configurations of this class, the smallest first; a class may refuse some of them."""
    whole = kind().to_dict()
    raw, wide = shrunk(whole), shrunk(whole, scale=4)
    plain, wider = (
        {name: x for name, x in one.items() if name.lstrip("_") not in DERIVED}
        for one in (raw, wide)
    )
    few = {name: raw[name] for name in raw if re.search(r"layers?$|vocab_size$|depth$", name)}
    alike = {"num_key_value_heads": plain.get("num_attention_heads")}
    attempts = (
        plain,
        raw,
        {**plain, **alike} if "num_key_value_heads" in plain else plain,
        {**plain, "num_hidden_layers": 4},
        wider,
        {**whole, **few},  # its own widths, which may depend on each other
        whole,
    )
    for options in attempts:
        with suppress(Exception):  # each class has its own rules; the next attempt may do
            yield kind.from_dict(copy.deepcopy(options))
