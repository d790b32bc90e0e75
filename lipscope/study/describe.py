"""Who is measured: the facts that decide every number, those a reader wants, and the tokens as text."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lipscope import __version__
from lipscope.linalg.spectral import Solver
from lipscope.models.scopes import SCOPES
from lipscope.study.plan import Request
from lipscope.study.probe import NUMERIC_VERSION
from lipscope.study.reading import Reading
from lipscope.study.records import About, Identity, Job, Sample

if TYPE_CHECKING:
    from lipscope.models.model import Model


def identity(model: Model, reading: Reading, tol: float, seed: int, special_tokens: bool) -> Identity:
    """Everything, beside a row's own columns, that decides its number."""
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
        tol=float(tol),
        seed=seed,
        numeric_version=NUMERIC_VERSION,
    )


def _config_digest(model: Model) -> str:
    """The configuration decides as much as the weights do; its place, its writer and its dtype do not."""
    trunk: Any = model.trunk
    config = trunk.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"):
        config.pop(name, None)
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def about(model: Model, reading: Reading, request: Request, who: Identity) -> About:
    """What a reader wants to know."""
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
        confidence=1 - Solver().failure if card.dtype == "float64" else 0.0,
        versions={"lipscope": __version__, "python": platform.python_version(), **card.versions},
        command=_command(model, reading, request, who),
    )


def _command(model: Model, reading: Reading, request: Request, who: Identity) -> str:
    """The command that measures the same again."""
    card, words = model.card, ["lipscope", "measure", model.card.name]
    lengths = sorted({n for n, _ in request.pairs})
    words += ["--text", reading.name, "--lengths", ",".join(map(str, lengths))]
    words += ["--samples", str(len(request.pairs) // len(lengths))]
    if len(request.layers) < model.layers:
        words += ["--layers", ",".join(map(str, request.layers))]
    for scope in request.scopes:
        words += ["--scope", scope]
    if card.random_init is not None:
        words += ["--random-init", str(card.random_init)]
    words += ["--special-tokens"] if who.special_tokens else []
    words += ["--tol", repr(who.tol), "--dtype", card.dtype, "--seed", str(who.seed)]
    return shlex.join(words)


def sample_texts(model: Model, reading: Reading, jobs: list[Job]) -> Iterator[Sample]:
    """The tokens of every sample that is about to be measured; none where the input is not made of tokens."""
    words: dict[int, str] = {}
    for n, sample in sorted({(job.n, sample) for job in jobs for sample in job.samples}):
        (row,) = reading.inputs.batch(n, (sample,))
        if row.is_floating_point():
            return
        ids = row.tolist()
        new = sorted(set(ids) - words.keys())
        words.update(zip(new, model.tokens(new) if model.tokenizer else map(str, new), strict=True))
        yield Sample(n, sample, tuple(words[i] for i in ids))
