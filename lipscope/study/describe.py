"""Describe a study: the facts that determine its numbers, those for readers, and its tokens."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
from collections.abc import Iterator
from typing import Any

from lipscope import __version__
from lipscope.linalg.spectral import Solver
from lipscope.models import embedded
from lipscope.models.model import Model
from lipscope.models.scopes import SCOPES
from lipscope.study.plan import Request
from lipscope.study.probe import NUMERIC_VERSION
from lipscope.study.reading import Reading
from lipscope.study.records import About, Identity, Job, Sample, Settings


def identity(model: Model, reading: Reading, settings: Settings, special_tokens: bool) -> Identity:
    """Everything, besides a row's own columns, that determines its number."""
    card = model.card
    return Identity(
        weights=card.weights,
        config=_config_digest(model),
        revision=card.revision or "",
        tokenizer=card.tokenizer or "",
        text=reading.inputs.digest,
        special_tokens=special_tokens,
        dtype=card.dtype,
        mask="the model's own; nothing is padded",
        tol=settings.tol,
        seed=settings.seed,
        numeric_version=NUMERIC_VERSION,
        gap=settings.gap,
    )


def _config_digest(model: Model) -> str:
    """Digest of the configuration, which matters as much as the weights do."""
    trunk: Any = model.trunk
    config = trunk.config.to_dict()
    # Where a configuration comes from and what wrote it does not change any number.
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"):
        config.pop(name, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def about(model: Model, reading: Reading, request: Request, who: Identity) -> About:
    """The description of the study for its readers."""
    card = model.card
    return About(
        model=card.name,
        architecture=card.architecture,
        layers=model.layers,
        heads=model.heads,
        device=model.device.type,
        text=reading.name,
        text_tokens=reading.tokens,
        scopes={name: f"{scope.formula}: {scope.description}" for name, scope in SCOPES.items()},
        difference_to_eager=model.preflight.difference,
        # Only float64 solves have an upper bound, and with it a probability to fail.
        confidence=1 - Solver().failure if card.dtype == "float64" else 0.0,
        versions={"lipscope": __version__, "python": platform.python_version(), **card.versions},
        command=_command(model, reading, request, who),
    )


def _command(model: Model, reading: Reading, request: Request, who: Identity) -> str:
    """The command that repeats the measurement; empty if the input was not a text."""
    if reading.option is None:
        return ""
    card, lengths = model.card, sorted({n for n, _ in request.pairs})
    heads = request.heads[request.layers[0]] if "heads" in request.scopes else ()
    options = {
        "--revision": card.revision if card.name != embedded.NAME else None,
        "--random-init": card.random_init,
        "--lengths": ",".join(map(str, lengths)),
        "--samples": len(request.pairs) // len(lengths),
        "--layers": ",".join(map(str, request.layers))
        if len(request.layers) < model.layers
        else None,
        "--heads": ",".join(map(str, heads)) if 0 < len(heads) < model.heads else None,
        "--tol": who.tol,
        "--gap": who.gap,
        "--dtype": who.dtype,
        "--seed": who.seed,
    }
    words = ["lipscope", "measure", card.name, *reading.option]
    words += [
        word for name, value in options.items() if value is not None for word in (name, str(value))
    ]
    words += [word for scope in request.scopes for word in ("--scope", scope)]
    return shlex.join(words + (["--special-tokens"] if who.special_tokens else []))


def sample_texts(model: Model, reading: Reading, jobs: list[Job]) -> Iterator[Sample]:
    """The tokens of every sample to be measured; none if the input does not consist of tokens."""
    words: dict[int, str] = {}
    for n, sample in sorted({(job.n, sample) for job in jobs for sample in job.samples}):
        (row,) = reading.inputs.batch(n, (sample,))
        if row.is_floating_point():
            return
        ids = row.tolist()
        # Decoding is slow, and long texts repeat their tokens: decode each id once.
        new = sorted(set(ids) - words.keys())
        words.update(zip(new, model.tokens(new) if model.tokenizer else map(str, new), strict=True))
        yield Sample(n, sample, tuple(words[i] for i in ids))
