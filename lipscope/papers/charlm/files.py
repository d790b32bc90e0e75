"""The files of a training: checkpoint, model folder without transformers, and curves."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipscope import UserError
from lipscope.papers.charlm.characters import UNKNOWN
from lipscope.papers.charlm.language_model import Architecture, CharacterTransformer
from lipscope.report import charts
from lipscope.report.document import write
from lipscope.report.figures import constants_by_step
from lipscope.report.palette import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from lipscope.papers.charlm.training import CurvePoint

FILE = "training.safetensors"
LOCK = "training.lock"
FACTS = "lipscope.training"
"""The key of the facts in the metadata of the file."""

CSV = "curves.csv"
PNG = "curves.png"

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


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None
) -> None:
    """Write a safetensors file atomically: readers see either the old file or the new one."""
    from safetensors.torch import save

    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt"} if facts is None else {"format": "pt", FACTS: json.dumps(facts)}
    write(save(content, metadata), path, typed=False)


def read_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and facts of the checkpoint in a directory, or None if there is no checkpoint."""
    from safetensors import safe_open

    path = directory / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[FACTS])
            names = file.keys()  # not a dict: it cannot be iterated over itself
            return {name: file.get_tensor(name) for name in names}, facts
    except Exception as error:  # safetensors raises its own classes
        raise UserError(
            f"{path} is not a checkpoint of lipscope train ({error}); give another --out"
        ) from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The state of an optimizer, keyed by parameter name and quantity."""
    state = optimizer.state_dict()["state"]
    return {
        f"{names[i]}/{quantity}": value
        for i, held in state.items()
        for quantity, value in held.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor]
) -> None:
    # Only the state is restored: the hyperparameters come from the recipe, which was compared.
    whole = optimizer.state_dict()
    held: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, quantity = key.rsplit("/", 1)
        held.setdefault(names.index(name), {})[quantity] = value
    optimizer.load_state_dict({"state": held, "param_groups": whole["param_groups"]})


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
    write(json.dumps(content, indent=1, ensure_ascii=False), path, typed=False)


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


def write_curves(curve: Sequence[CurvePoint], directory: Path, unigram_loss: float) -> None:
    """Write curves.csv and curves.png to the directory."""
    write(curves_csv(curve), directory / CSV, typed=False)
    picture = io.BytesIO()
    draw_curves(curve, unigram_loss).savefig(picture, dpi=120)
    write(picture.getvalue(), directory / PNG, typed=False)


def curves_csv(curve: Sequence[CurvePoint]) -> str:
    """One row per evaluation: step, both losses in nats per character, sigma of each layer."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    layers = range(len(curve[0].constants))
    writer.writerow(["step", "training_loss", "test_loss", *(f"sigma_layer_{i}" for i in layers)])
    for r in curve:
        losses = ("" if math.isnan(x) else repr(x) for x in (r.learned, r.test))
        writer.writerow([r.step, *losses, *map(repr, r.constants)])
    return out.getvalue()


def draw_curves(curve: Sequence[CurvePoint], unigram_loss: float) -> Figure:
    """Losses on the left, constants on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for ax in (left, right):
        charts.style(ax, 10)
    steps = [r.step for r in curve]
    # The first evaluation comes before any step, and has no training loss.
    left.plot(steps[1:], [r.learned for r in curve[1:]], ":", label="training", color=colour("s1"))
    left.plot(steps, [r.test for r in curve], label="test", color=colour("s0"))
    left.axhline(unigram_loss, color=colour("muted"), linestyle="--", label="unigram baseline")
    left.set(xlabel="step", ylabel="loss (nats per character)")
    left.legend()
    found = {
        f"layer {i}": (steps, [r.constants[i] for r in curve])
        for i in range(len(curve[0].constants))
    }
    constants_by_step(right, found)
    right.set_ylabel("local Lipschitz constant of attention")
    return figure


def curve_table(curve: Sequence[CurvePoint], unigram_loss: float) -> Table:
    """One row per evaluation, at most twelve, always including the last."""
    from rich.table import Table

    table = Table(
        *("step", "training loss", "test loss", "sigma, smallest layer", "sigma, largest layer"),
        caption=f"losses in nats per character; the unigram baseline is {unigram_loss:.3f}",
    )
    for column in table.columns:
        column.justify = "right"
    # A training of any length fits a screen.
    every = math.ceil(len(curve) / 12)
    # Backwards from the last evaluation, so that it is always among those shown.
    for r in curve[len(curve) - 1 :: -every][::-1]:
        losses = ("" if math.isnan(x) else f"{x:.3f}" for x in (r.learned, r.test))
        sigmas = (f"{f(r.constants):.3g}" for f in (min, max))
        table.add_row(str(r.step), *losses, *sigmas)
    return table
