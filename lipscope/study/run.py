"""The main job: measure a model on a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lipscope._types import UserError
from lipscope.linalg.certificate import check_gap
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.study.describe import about, identity, sample_texts
from lipscope.study.engine import Engine, InProcess, Workers
from lipscope.study.plan import WHOLE_MODEL, Request
from lipscope.study.reading import Choice, Reading, Text, read
from lipscope.study.records import Settings, StudyInfo
from lipscope.study.store import Store
from lipscope.study.study import SIGMA, Study
from lipscope.study.work import SigmaWork, StartSigmaWork, survey, threads_for
from lipscope.study.writer import Progress, keep


def measure(
    model: Any = None,
    text: Text = None,
    lengths: Sequence[int] | None = None,
    samples: int = 3,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    scopes: Sequence[str] = ("heads", "attention"),
    *,
    tol: float = 1e-6,
    gap: float | None = None,
    seed: int = 0,
    workers: int = 1,
    out: str | os.PathLike[str] | None = None,
    inputs: Tensor | None = None,
    special_tokens: bool = False,
    progress: Progress | None = None,
) -> Study:
    """The local Lipschitz constants of a model's attention on a text, at several lengths.

    model:   what `lipscope.load` gives, or anything it takes; by default the embedded model.
    text:    a string, a file (Path) or a list of strings to sample from; or token ids, sampled from where
             `lengths` are given, else measured whole, one sample per row.
    inputs:  embeddings [B, n, d] or pixel values [B, c, h, w], measured whole, in place of a text.
    lengths: numbers of tokens, by default 8 to 256 as far as text and model go; `samples` are drawn for each.
    tol:     a solve ends at this relative residual,
    gap:     and goes on until upper / lower <= 1 + gap (float64 alone has an upper bound); a row that cannot says why.
    out:     a directory that keeps every number once it is known; the same call goes on where it stopped.
    workers: processes that measure; 1 is this one.
    """
    settings = Settings(float(tol), None if gap is None else float(gap), seed)
    _check_numbers(samples, settings, workers)
    model = _loaded(model)
    _check_certifiable(model, settings)
    with threads_for(tokens=1):
        reading = read(model, text, inputs, Choice(lengths, samples, seed, special_tokens))
        request = _request(model, reading, layers, heads, scopes)
    engine = _engine(model, reading, settings, workers)
    who = identity(model, reading, settings, special_tokens)
    store = Store.create(
        None if out is None else Path(out), StudyInfo(who, about(model, reading, request, who))
    )
    try:
        jobs = request.jobs(store.done(SIGMA))
        store.write_samples(sample_texts(model, reading, jobs))
        keep(engine.run(jobs), store, jobs, progress)
    except BaseException:
        store.close()
        raise
    if store.directory is None:
        return Study(store)
    store.close()
    return Study.open(store.directory)


def _check_numbers(samples: int, settings: Settings, workers: int) -> None:
    tol, gap, seed = settings
    if samples < 1:
        raise UserError(f"samples must be at least 1, got {samples}.")
    if not 0 < tol < 1:
        raise UserError(f"tol, a relative residual, must lie between 0 and 1, got {tol}.")
    check_gap(gap)
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}.")
    if workers < 1:
        raise UserError(f"workers must be at least 1, got {workers}.")


def _check_certifiable(model: Model, settings: Settings) -> None:
    if settings.gap is not None and model.card.dtype != "float64":
        raise UserError(
            f"gap asks how far the upper bound may lie above the lower one, and {model.card.dtype} gives no upper "
            "bound: measure in float64 (--dtype float64), or leave gap out."
        )


def _loaded(model: Any) -> Model:
    return model if isinstance(model, Model) else load(model)


def _request(
    model: Model,
    reading: Reading,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    scopes: Sequence[str],
) -> Request:
    """What is asked for, once a trial on the shortest sample has shown that the model has all of it."""
    wanted = tuple(dict.fromkeys([scopes] if isinstance(scopes, str) else scopes))
    for name, given in (("scope", wanted), ("layer", layers), ("head", heads)):
        if given is not None and not list(given):
            raise UserError(f"give at least one {name}.")
    model.check_scopes(wanted)
    chosen = range(model.layers) if layers is None else tuple(dict.fromkeys(layers))
    for layer in chosen:
        if not 0 <= layer < model.layers:
            raise UserError(
                f"layer {layer} does not exist: {model.card.name} has layers 0 to {model.layers - 1}."
            )
    model.check_heads(heads, chosen)
    pairs = tuple(reading.inputs.pairs)
    trial = survey(model, reading.inputs, pairs[0][0], pairs[0][1:])
    numbers: dict[int, tuple[int, ...]] = {}
    for layer in chosen:
        sites = [trial.site(scope, layer, heads) for scope in wanted if scope != WHOLE_MODEL]
        numbers[layer] = tuple(
            head for site in sites for _, head in site.members if head is not None
        )
    if WHOLE_MODEL in wanted:
        trial.site(WHOLE_MODEL)
    return Request(pairs, tuple(chosen), numbers, wanted)


def _engine(model: Model, reading: Reading, settings: Settings, workers: int) -> Engine:
    if workers == 1:
        return InProcess(SigmaWork(model, reading.inputs, settings))
    if not model.owned:
        raise UserError(
            "a module given as an object is measured in this process; use workers=1, or give its path."
        )
    threads = max(1, (os.cpu_count() or 1) // workers)
    return Workers(StartSigmaWork(model.card, reading.inputs, settings, threads), workers)
