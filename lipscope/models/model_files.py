"""The files and the configuration of a model folder, checked before anything opens them.

A folder may come from anywhere. Only regular files of bounded size are read, and no link leads out
of the folder; the links of the hub's cache, from a snapshot to its blobs, are the one exception.
Numbers in a configuration are checked before a model class turns them into memory and time.
"""

from __future__ import annotations

import copy
import json
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from lipscope._files import on_one_line as on_one_line
from lipscope._types import UserError
from lipscope.linalg.golub_kahan import memory_of
from lipscope.models._transformers_internals import random_model

MEBIBYTE = 1 << 20

LIMITS = {"config.json": 16 * MEBIBYTE, "": 256 * MEBIBYTE}
"""Largest size by the end of a file's name, first match; real ones stay below a quarter of it."""

DEPTH = 64
"""Maximum nesting of a JSON file; real ones have less than 10 levels."""

CGROUP = Path("/sys/fs/cgroup/memory.max")


def checked_file(path: Path, name: str, limit: int | None = None) -> Path:
    """`path` itself, once it is certain to be a regular file of the model `name`, not too large."""
    shown = for_terminal(path.name, 100)
    try:
        folder = path.parent.resolve()
        target = path.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that go in a circle
        raise UserError(f"{name}: {shown} cannot be read ({on_one_line(error)})") from error
    homes = [folder]
    if folder.parent.name == "snapshots":  # the hub's cache: models--x/snapshots/commit/file
        homes.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        raise UserError(
            f"{name}: {shown} is a link that leads out of the folder; put the file itself there"
        )
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{name}: {shown} is not a regular file; remove it, or put a file there")
    if limit is None:
        limit = next(size for end, size in LIMITS.items() if path.name.endswith(end))
    if status.st_size > limit:
        raise UserError(
            f"{name}: {shown} has {size_of(status.st_size)}, "
            f"more than the {size_of(limit)} that such a file may have here"
        )
    return path


def read_json(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the model `name`."""
    checked_file(path, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise UserError(f"{name}: {path.name} is nested too deeply to be read") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path.name} cannot be read ({on_one_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{name}: {path.name} must contain a JSON object, got {type(content).__name__}"
        )
    # Breadth first: code that walks the content by recursion meets no more than DEPTH levels.
    level: list[Any] = [content]
    for _ in range(DEPTH):
        level = [
            part
            for parent in level
            for part in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(part, dict | list)
        ]
    if level:
        raise UserError(f"{name}: {path.name} is nested more than {DEPTH} levels deep")
    return content


def memory_here() -> int:
    """Bytes of memory that this process could have at most: the machine's, or its container's."""
    total = memory_of(torch.device("cpu"))
    try:
        return min(total, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return total


def size_of(count: int) -> str:
    """A number of bytes, for readers."""
    size = float(count)
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size >= 1024:
            size = size / 1024
            unit = larger
    return f"{size:.3g} {unit}"


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
