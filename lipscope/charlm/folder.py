"""The folder of a trained character model: configuration, tokenizer and weights, written without transformers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lipscope._files import whole_file
from lipscope.charlm.characters import UNKNOWN
from lipscope.charlm.checkpoint import write_tensors
from lipscope.charlm.language_model import Architecture, CharacterTransformer

MODEL_TYPE, MODEL_CLASS = "lipscope_character", "CharacterModel"
"""What transformers is to know it by; both are defined in lipscope.charlm.pretrained."""

NAMES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
"""Sizes of an Architecture by the names that transformers has for them; its other fields keep theirs."""


def save_character_model(directory: Path, model: CharacterTransformer, alphabet: str) -> None:
    """A folder that `lipscope measure` and AutoModel read: configuration, tokenizer, and last the weights."""
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
    state = {f"network.{name}": value for name, value in model.state_dict().items()}
    write_tensors(directory / "model.safetensors", state)


def config_fields(architecture: Architecture) -> dict[str, Any]:
    """An architecture as a configuration file has it."""
    return {NAMES.get(name, name): value for name, value in asdict(architecture).items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as draft:
        draft.write_bytes(json.dumps(content, indent=1, ensure_ascii=False).encode())


def character_tokenizer(alphabet: str) -> dict[str, Any]:
    """A tokenizer.json: every character is a token, and one that is not in the alphabet is unknown."""
    vocabulary = {character: i for i, character in enumerate(alphabet)}
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
