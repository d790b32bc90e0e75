"""Budgets and comparisons of runs for one architecture of the survey, with a planted bug.

What is right is decided here without the code under test: hidden states are read by hooks of this
file, in float64 and in bf16, and a weight counts as worth flipping if that moves the output of its
layer by more than MATTERS times what bf16 does.
"""

import copy
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope.models.attention import using_attention
from lipscope.models.capture import capture, first_tensor
from lipscope.models.loading import load
from lipscope.models.maps import Float64
from lipscope.probes.budget.subject import copied

PROBES = 16
SAMPLES = 4
LENGTH = 16
IMAGES = 2
SIDE = 64
SCALES = (1, 4)
"""Factors of the weights in the blocks, tried in turn until the sign of one of them matters."""

MATTERS = 3.0
"""A planted bug moves the output of its layer by at least this many times the error of bf16."""


def budget_cells(model: Any, given: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is asked of an architecture, by name, each as a function that answers."""
    for name in ("bf16", "int8", "kv4"):
        yield name, lambda name=name: _budget(model, given, name)
    yield "clean", lambda: _clean(model, given)
    yield "planted", lambda: _planted(model, given)


def samples_of(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Several samples like the one that the model was measured on, for budgets."""
    generator = torch.Generator().manual_seed(1)
    if "input_ids" in given:
        # Ids of the sample that ran: others may stand for images or sounds.
        pool = given["input_ids"][0]
        n = min(LENGTH, model.max_positions or LENGTH)
        return {"text": pool[torch.randint(len(pool), (SAMPLES, n), generator=generator)]}
    inputs = given.get("inputs", given)
    # Images of the usual size are thousands of tokens, and sixteen backward passes through them.
    small = {name: x[..., :SIDE, :SIDE] if x.ndim > 3 else x for name, x in inputs.items()}
    with suppress(ls.UserError, RuntimeError):
        # A copy: models that cut images into windows adapt them to the first size they meet.
        load(copied(model.trunk)).survey(inputs=small)
        inputs = small
    return {
        "inputs": {
            name: torch.randn((IMAGES, *x.shape[1:]), generator=generator, dtype=x.dtype)
            for name, x in inputs.items()
        }
    }


def _budget(model: Any, given: dict[str, Any], name: str) -> dict[str, Any]:
    found = ls.error_budget(model, **given, formats=name, probes=PROBES, observe=True)
    predicted, observed = found.total(name).value, found.observed[name]
    return {
        "outcome": "stated",
        "predicted": predicted,
        "observed": observed,
        "ratio": observed / predicted if predicted else None,
        "bent": found.second_order[name],
        "warned": bool(found.warnings()),
    }


def in_bf16(module: Any) -> Any:
    """A port as from_pretrained(dtype=bfloat16) makes it: the model's code decides on buffers."""
    port = type(module)._from_config(
        copy.deepcopy(module.config), dtype=torch.bfloat16, attn_implementation="eager"
    )
    given = dict([*module.named_parameters(), *module.named_buffers()])
    for name, tensor in [*port.named_parameters(), *port.named_buffers()]:
        tensor.data = given[name].data.to(tensor.dtype)
    return port.eval()


def _clean(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    found = ls.check_run(model, in_bf16(model.trunk), **given, format="bf16")
    worst = max(found.states, key=lambda state: state.ratio / state.limit)
    return {
        "outcome": "explained" if found.ok else "accused",
        "states": len(found.states),
        "ratio": worst.ratio,
        "limit": worst.limit,
        "at": worst.name,
    }


def _planted(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    bug: dict[str, Any] = {}
    ls.check_run(model, in_bf16(model.trunk), **given, format="bf16")  # or why it cannot
    lists = _block_lists(model)
    for scale in SCALES:
        model = _scaled(model, lists, scale)
        bug = {"scale": scale, **find_bug(model.trunk, lists, given)}
        if bug["weight"] is not None:
            break
    else:
        return {"outcome": "nothing to plant", **bug}
    port = in_bf16(model.trunk)
    dict(port.named_parameters())[bug["weight"]].data.neg_()
    found = ls.check_run(model, port, **given, format="bf16")
    bad = found.first_outside
    named = None if bad is None else bad.name
    right = named == f"layer {bug['layer']}"
    outcome = "named" if right else "missed" if bad is None else "elsewhere"
    return {"outcome": outcome, **bug, "named": named, "ratio": None if bad is None else bad.ratio}


def _scaled(model: Any, lists: list[str], scale: float) -> Any:
    """The model with larger weights in its blocks; random ones may be too small to matter."""
    if scale == 1:
        return model
    trunk = copied(model.trunk)
    for _, weight in _drawn(trunk, lists, random.Random(0)):
        weight.data *= scale
    return ls.load(trunk)


def find_bug(trunk: Any, lists: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """A weight matrix whose sign matters: its name, its layer, and how much it matters.

    Layers and weights are drawn by the name of the architecture. A weight whose flip moves the
    output of its layer by less than MATTERS times the error of bf16 is passed over.
    """
    exact, low = copied(trunk).double().eval(), in_bf16(trunk)
    truth = block_outputs(exact, lists, given)
    noise = _moves(truth, block_outputs(low, lists, given))
    draw = random.Random(zlib.crc32(type(trunk).__name__.encode()))
    largest = 0.0
    for name, weight in _drawn(exact, lists, draw):
        weight.data.neg_()
        moves = _moves(truth, block_outputs(exact, lists, given))
        weight.data.neg_()
        first = next((i for i, move in enumerate(moves) if move > 0), None)
        if first is None:
            continue  # a part that does not run
        effect = moves[first] / noise[first] if noise[first] else float("inf")
        largest = max(largest, effect)
        if effect >= MATTERS:
            return {"weight": name, "layer": first, "effect": effect}
    return {"weight": None, "layer": None, "effect": largest}


def _block_lists(model: Any) -> list[str]:
    """The paths of the lists of modules that hold the blocks of a model's layers."""
    held = {id(layer.block or layer.core) for layer in model._known_layers()}
    return [
        path
        for path, parent in model.trunk.named_modules()
        if isinstance(parent, nn.ModuleList)
        and any(id(part) in held for member in parent for part in member.modules())
        and not any(
            isinstance(part, nn.ModuleList) and _holds(part, held)
            for member in parent
            for part in member.modules()
        )
    ]


def _drawn(
    trunk: nn.Module, lists: list[str], draw: random.Random
) -> Iterator[tuple[str, nn.Parameter]]:
    """The weight matrices of all blocks: blocks in random order, and the weights of each."""
    parts = dict(trunk.named_modules())
    blocks = [f"{path}.{i}" for path in lists for i in range(len(parts[path]))]
    for path in draw.sample(blocks, len(blocks)):
        named = [(f"{path}.{name}", p) for name, p in parts[path].named_parameters()]
        weights = [(name, p) for name, p in named if p.ndim >= 2]
        yield from draw.sample(weights, len(weights))


def _holds(members: nn.ModuleList, held: set[int]) -> bool:
    return any(id(part) in held for member in members for part in member.modules())


def block_outputs(trunk: nn.Module, lists: list[str], given: dict[str, Any]) -> list[Tensor]:
    """The output of every call of a block for the first sample, in order."""
    parts = dict(trunk.named_modules())
    blocks = [member for path in lists for member in parts[path]]
    row = {"input_ids": given["text"]} if "text" in given else given["inputs"]
    dtype = next(trunk.parameters()).dtype
    arguments = {
        name: x[:1].to(dtype) if x.is_floating_point() else x[:1] for name, x in row.items()
    }
    wide = Float64() if dtype == torch.float64 else nullcontext()
    sides = dict.fromkeys(blocks, "output")
    with torch.no_grad(), using_attention(trunk, "eager"), capture(sides) as captured, wide:
        trunk(**arguments)
    return [first_tensor(found.value).detach().double() for found in captured]


def _moves(a: list[Tensor], b: list[Tensor]) -> list[float]:
    """How far the output of every block has moved, relative to its norm."""
    return [float((y - x).norm() / x.norm()) for x, y in zip(a, b, strict=True)]
