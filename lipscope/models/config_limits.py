"""Numbers in a configuration, checked before a model class turns them into memory and time."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PretrainedConfig, PreTrainedModel

from lipscope._files import for_terminal
from lipscope._types import UserError
from lipscope.models._transformers_internals import random_model
from lipscope.models.model_files import memory_here, size_of

LARGEST = (
    (r"theta|base|period|max_length|seed|temperature", None),
    (r"layers?$|depths?$|blocks?$|stages?$|levels?$|num_\w*(convs|iterations|steps)$", 2048),
    (r"heads?$|groups?$", 1 << 14),
    (r"experts?$|labels?$", 1 << 20),
    (r"vocab|token|bucket|codebook", 1 << 24),
    (r"position|length|seq|window|context|patch|frames", 1 << 26),
    (r"", 1 << 24),
)
"""Largest value of an entry by its name, first match. The largest models stay well below it."""

SECONDS = 20.0
"""How long the empty model may take to build."""


def check_numbers(content: Any, name: str, key: str = "") -> None:
    """Raise UserError for a number in config.json, at any depth, that no model can mean."""
    if isinstance(content, dict):
        for inner, value in content.items():
            check_numbers(value, name, inner)
    elif isinstance(content, list):
        for value in content:
            check_numbers(value, name, key)
    elif isinstance(content, int):  # floats are no sizes, and some are infinite on purpose
        limit = next(largest for words, largest in LARGEST if re.search(words, key))
        if limit is not None and abs(content) > limit:
            raise UserError(
                f"{name}: {for_terminal(key, 80)} is {for_terminal(repr(content), 30)} in its "
                f"config.json, outside {-limit} to {limit}; correct the file"
            )


def check_size(
    kind: type[PreTrainedModel], config: PretrainedConfig, name: str, itemsize: int
) -> int | None:
    """The number of weights, if they fit into memory; else raises UserError. None if unknown.

    Builds the model without any memory for its weights.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), _counting(name, itemsize):
            empty = random_model(kind, copy.deepcopy(config))  # building writes its dtype into it
    except UserError:
        raise
    except Exception:
        # A class that needs real tensors to be built says so here; the build itself will tell.
        return None
    return sum(p.numel() for p in empty.parameters())


@contextmanager
def _counting(name: str, itemsize: int) -> Iterator[None]:
    """Stop the construction of a model once its weights exceed memory, or it takes too long."""
    deadline = time.monotonic() + SECONDS
    memory = memory_here()
    total = 0

    def check(module: nn.Module, _: str, registered: Any) -> None:
        nonlocal total
        if isinstance(registered, torch.Tensor):
            total += registered.numel() * itemsize
        if total > memory:
            raise UserError(
                f"the weights of {name} need more than the {size_of(memory)} of memory here; "
                "choose a smaller model or dtype"
            )
        if time.monotonic() > deadline:
            raise UserError(
                f"{name} takes more than {SECONDS:.0f} s to build; check the sizes in config.json"
            )

    handles = [
        register(check)
        for register in (
            register_module_parameter_registration_hook,
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
