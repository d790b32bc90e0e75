"""The folder of a trained model: configuration, tokenizer, weights, without transformers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lipscope._files import whole_file
from lipscope.papers.charlm.characters import UNKNOWN
from lipscope.papers.charlm.checkpoint import write_tensors
from lipscope.papers.charlm.language_model import Architecture, CharacterTransformer

MODEL_TYPE = "lipscope_character"
MODEL_CLASS = "CharacterModel"
"""The names transformers knows it by; lipscope.papers.charlm.pretrained defines both."""

NAMES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
"""Fields of an Architecture that transformers has other names for."""


def save_character_model(directory: Path, model: CharacterTransformer, alphabet: str) -> None:
    """Write a folder that `lipscope measure` and AutoModel can load; the weights come last."""
    kind = {"model_type": MODEL_TYPE, "architectures": [MODEL_CLASS]}
    write_json(directory / "config.json", kind | config_fields(model.architecture))
    write_json(directory / "tokenizer.json", character_tokenizer(alphabet))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.architecture.context,
        },
    )
    # The weights come last: a folder that has them has everything else.
    state = {f"network.{name}": value for name, value in model.state_dict().items()}
    write_tensors(directory / "model.safetensors", state)


def config_fields(architecture: Architecture) -> dict[str, Any]:
    """The fields of an architecture under the names of a configuration file."""
    return {NAMES.get(name, name): value for name, value in asdict(architecture).items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as draft:
        draft.write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


def character_tokenizer(alphabet: str) -> dict[str, Any]:
    """The content of tokenizer.json: one token per character, UNKNOWN outside the alphabet."""
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    # Written out, where the tokenizers package would pull in transformers: training needs neither.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN},
    }
