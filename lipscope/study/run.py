"""Measure the attention of a model on a text: the main entry point."""

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
from lipscope.models.sites import Survey
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
    """Measure the local Lipschitz constants of a model's attention on a text, at several lengths.

    Args:
        model: A :class:`Model`, or anything :func:`load` takes. Default: the embedded model.
        text: A string, a file (``Path``) or a list of strings to sample from; or token ids, which
            are sampled from if `lengths` is given, else measured whole, one sample per row.
            Default: the embedded text.
        lengths: Numbers of tokens. Default: 8 to 256, as far as the text and the model allow.
        samples: Number of samples per length.
        layers: Layer numbers, from 0. Default: all layers.
        heads: Head numbers, for the scope heads. Default: all heads.
        scopes: The maps to measure at each layer; see docs/scopes.md.
        tol: Relative residual at which a solve stops.
        gap: Keep iterating until upper / lower - 1 is at most this (float64 only). A row that
            cannot reach it says why in its status.
        seed: Seed for drawing samples and for the solver's random starts.
        workers: Number of worker processes; 1 measures in this process.
        out: Directory to save the study in; repeat the same call to resume an interrupted run.
        inputs: Embeddings [B, n, d] or pixel values [B, c, h, w], measured whole, instead of a
            text.
        special_tokens: Whether to frame every sample with the tokenizer's special tokens.
        progress: Called with the work done and the total work, at the start and after every job.

    Returns:
        The :class:`Study` with one row per layer, head, length and sample.

    Raises:
        UserError: If an argument is invalid, or the model or the text lacks what is requested.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> _ = torch.manual_seed(0)
        >>> model = LlamaModel(LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=48,
        ...     num_hidden_layers=2, num_attention_heads=4))
        >>> ls.measure(model, torch.arange(64), lengths=[4, 8, 16], samples=1)
        Study(LlamaModel: 30 values, 0 failed, n = 4 to 16)
    """
    settings = Settings(float(tol), None if gap is None else float(gap), seed)
    _check_numbers(samples, settings, workers)
    model = _loaded(model)
    _check_certifiable(model, settings)
    choice = Choice(lengths=lengths, samples=samples, seed=seed, special_tokens=special_tokens)
    with threads_for(tokens=1):
        reading = read(model, text, inputs, choice)
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
    # Reopened for reading: the returned study does not hold the lock of the directory.
    store.close()
    return Study.open(store.directory)


def _check_numbers(samples: int, settings: Settings, workers: int) -> None:
    tol, gap, seed = settings
    if samples < 1:
        raise UserError(f"samples must be at least 1, got {samples}")
    if not 0 < tol < 1:
        raise UserError(f"tol, a relative residual, must lie between 0 and 1, got {tol}")
    check_gap(gap)
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}")
    if workers < 1:
        raise UserError(f"workers must be at least 1, got {workers}")


def _check_certifiable(model: Model, settings: Settings) -> None:
    if settings.gap is not None and model.card.dtype != "float64":
        raise UserError(
            f"gap limits upper / lower - 1, and {model.card.dtype} gives no upper bound; "
            "measure in float64 (--dtype float64), or omit gap"
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
    """The request, after a trial on the shortest sample has shown that the model supports it."""
    wanted = tuple(dict.fromkeys([scopes] if isinstance(scopes, str) else scopes))
    for name, given in (("scope", wanted), ("layer", layers), ("head", heads)):
        if given is not None and not list(given):
            raise UserError(f"give at least one {name}")
    model.check_scopes(wanted)
    chosen = range(model.layers) if layers is None else tuple(dict.fromkeys(layers))
    for layer in chosen:
        if not 0 <= layer < model.layers:
            raise UserError(
                f"layer {layer} does not exist: {model.card.name} has layers "
                f"0 to {model.layers - 1}"
            )
    model.check_heads(heads, chosen)
    pairs = tuple(reading.inputs.pairs)
    # Better an error now than a failed row for every sample after an hour.
    trial = survey(model, reading.inputs, pairs[0][0], pairs[0][1:])
    numbers: dict[int, tuple[int, ...]] = {}
    for layer in chosen:
        sites = [trial.site(scope, layer, heads) for scope in wanted if scope != WHOLE_MODEL]
        numbers[layer] = tuple(
            head for site in sites for _, head in site.members if head is not None
        )
    if WHOLE_MODEL in wanted:
        _check_available(trial, WHOLE_MODEL)
    return Request(pairs=pairs, layers=tuple(chosen), heads=numbers, scopes=wanted)


def _check_available(trial: Survey, scope: str) -> None:
    """Raise UserError if the model does not have this map."""
    trial.site(scope)


def _engine(model: Model, reading: Reading, settings: Settings, workers: int) -> Engine:
    if workers == 1:
        return InProcess(SigmaWork(model, reading.inputs, settings))
    if not model.owned:
        raise UserError(
            "a live module can only be measured in this process; use workers=1, or give its path"
        )
    # Workers share the cores; with torch's default each would use all of them.
    threads = max(1, (os.cpu_count() or 1) // workers)
    start = StartSigmaWork(
        card=model.card, inputs=reading.inputs, settings=settings, threads=threads
    )
    return Workers(start, workers)
