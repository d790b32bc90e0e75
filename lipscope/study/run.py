"""Measure the attention of a model on a text: the main entry point."""

from __future__ import annotations

import math
import os
import platform
import shlex
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lipscope import __version__
from lipscope._ambient import entry_point
from lipscope._checks import check_arguments
from lipscope._notebook_bar import with_bar
from lipscope._types import UserError
from lipscope.linalg.certificate import check_gap
from lipscope.linalg.spectral import Solver
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.models.scopes import SCOPES, check_scope_names
from lipscope.models.sites import Survey
from lipscope.study.clusters import check_engine, open_engine
from lipscope.study.engines import Engine, Start
from lipscope.study.jobs import (
    WHOLE_MODEL,
    Command,
    Job,
    Outcome,
    Request,
    grouped,
    run_in_process,
)
from lipscope.study.ranks import RankEngine, open_rank_engine
from lipscope.study.reading import Text, WholeInputs, Windows, read, sample_tokens
from lipscope.study.records import SIGMA, About, Identity, StudyInfo
from lipscope.study.sharding import Shard, check_shard
from lipscope.study.store import Store
from lipscope.study.study import Study
from lipscope.study.work import (
    NUMERIC_VERSION,
    SigmaWork,
    config_digest,
    start_sigma_work,
    survey,
    threads_for,
)

Progress = Callable[[float, float], None]
"""Called with the work done and the total work, at the start and after every job."""

GAP = 0.1
"""How close the bounds of a float64 study are brought together by default."""

OpenEngine = Callable[[], AbstractContextManager[Engine | RankEngine | None]]


@entry_point
@with_bar("measuring")
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
    cluster: str | None = None,
    shard: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
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
        gap: Keep iterating until upper / lower - 1 is at most this. Default: 0.1 in float64, the
            only dtype with upper bounds; ``math.inf`` takes them as they come. A row that cannot
            reach the gap says why in its status.
        seed: Seed for drawing samples and for the solver's random starts.
        workers: Number of worker processes on this machine; 1 measures in this process.
        cluster: Workers on other machines: the address of a dask scheduler, a batch system and a
            number of its jobs ("slurm:64"), or a YAML file; see docs/scaling.md.
        shard: (k, N): measure only the k-th of N parts of the study, k from 1. `lipscope merge`
            or :func:`merge` joins them.
        out: Directory to save the study in; repeat the same call to resume an interrupted run.
        inputs: Measured whole, instead of a text: embeddings [B, n, d], pixel values [B, c, h, w],
            the sound that an audio model reads, or all arguments of the model by name, each with
            one row per sample. The n of a row is the number of tokens that the first block reads.
        special_tokens: Whether to frame every sample with the tokenizer's special tokens.
        progress: Called with the work done and the total work, at the start and after every job.
            Default: a bar in notebooks, nothing elsewhere.

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
    check_engine(workers, cluster)
    model = model if isinstance(model, Model) else load(model)
    if (workers > 1 or cluster is not None) and not model.owned:
        raise UserError(
            "a live module can only be measured in this process; use workers=1, or give its path"
        )
    return measure_as(
        Verb("measure"),
        model,
        text,
        lengths,
        samples,
        layers,
        heads,
        scopes,
        tol=tol,
        gap=gap,
        seed=seed,
        engine=open_rank_engine() or partial(open_engine, workers, cluster),
        shard=None if shard is None else check_shard(shard),
        out=out,
        inputs=inputs,
        special_tokens=special_tokens,
        progress=progress,
    )


class Verb(NamedTuple):
    """The command on whose behalf a model is measured, for the list of commands of the study.

    probe_prefix: how `Row.probe` begins in the rows that the command writes last at each place
    options:      the options that only this command has
    """

    name: str
    probe_prefix: str = SIGMA
    options: Mapping[str, object] = {}


def measure_as(
    verb: Verb,
    model: Any,
    text: Text,
    lengths: Sequence[int] | None,
    samples: int,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    scopes: Sequence[str],
    *,
    tol: float = 1e-6,
    gap: float | None = None,
    seed: int = 0,
    engine: OpenEngine = nullcontext,
    shard: Shard | None = None,
    out: str | os.PathLike[str] | None = None,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
    special_tokens: bool = False,
    progress: Progress | None = None,
) -> Study:
    """`measure` for any command; the other arguments are those of `measure`.

    Args:
        engine: Opens the engine that runs the jobs; None runs them in this process.
    """
    lengths = _as_list(lengths)
    layers = _as_list(layers)
    heads = _as_list(heads)
    scopes = [scopes] if isinstance(scopes, str) else scopes
    check_settings(
        {
            "lengths": lengths,
            "samples": samples,
            "layers": layers,
            "heads": heads,
            "scopes": scopes,
            "tol": tol,
            "gap": gap,
            "seed": seed,
            "special_tokens": special_tokens,
        }
    )
    model = model if isinstance(model, Model) else load(model)
    gap = _gap(gap, model.card.dtype)
    with threads_for(tokens=1):
        given = read(
            model,
            text,
            inputs,
            lengths=lengths,
            samples=samples,
            seed=seed,
            special_tokens=special_tokens,
        )
    request, trial = _request(model, given, layers, heads, scopes)
    identity = Identity(
        weights=model.card.weights,
        config=config_digest(model),
        revision=model.card.revision or "",
        tokenizer=model.card.tokenizer or "",
        text=given.digest,
        special_tokens=special_tokens,
        dtype=model.card.dtype,
        mask="the model's own; nothing is padded",
        tol=float(tol),
        seed=seed,
        numeric_version=NUMERIC_VERSION,
        gap=gap,
    )
    command = Command(
        verb=verb.name,
        line=_line(verb, model, given, request, identity),
        asked=request,
        probe_prefix=verb.probe_prefix,
    )
    info = StudyInfo(identity, _about(model, given, command.line))
    store = Store.create(None if out is None else Path(out), info, command)
    try:
        jobs = request.jobs(store.done(SIGMA))
        pairs = ((job.n, sample) for job in jobs for sample in job.samples)
        store.write_samples(sample_tokens(model, given, pairs))
        if shard is not None:
            jobs = [job for job in jobs if shard.has(job)]
        with engine() if jobs else nullcontext() as running:
            if running is None:
                work = SigmaWork(model, given, identity, surveyed=(request.groups[0], trial))
                outcomes = run_in_process(work, jobs)
            else:
                outcomes = running.run(_start(model, given, identity), jobs)
            store_outcomes(outcomes, store, jobs, info, progress)
    except BaseException:
        store.close()
        raise
    if store.directory is None:
        return Study(store)
    # Reopened for reading: the returned study does not hold the lock of the directory.
    store.close()
    return Study.open(store.directory)


def store_outcomes(
    outcomes: Generator[Outcome],
    store: Store,
    jobs: Sequence[Job],
    info: StudyInfo,
    progress: Progress | None = None,
) -> None:
    """Store every outcome before the next one is requested.

    What is stored stays, whatever happens next; a KeyboardInterrupt passes with a note on how much
    that is and how to resume.
    """
    total = sum(job.weight for job in jobs)
    done = 0.0
    kept = 0
    try:
        if progress is not None:
            progress(done, total)
        with closing(outcomes):  # on any error the workers end now, not at exit
            for job, rows, sensitivities, failure in outcomes:
                if failure is not None:
                    rows = job.failed_rows(failure, info.identity.dtype, info.about.device)
                store.write(rows, sensitivities)
                done = done + job.weight
                kept = kept + 1
                if progress is not None:
                    progress(done, total)
    except KeyboardInterrupt as stop:
        stop.add_note(
            "Stopped; nothing was saved, because no --out directory was given."
            if store.directory is None
            else f"Stopped; {kept} of {len(jobs)} jobs are saved in {store.directory}. "
            "Run the same command again to resume."
        )
        raise


def _start(model: Model, inputs: Windows | WholeInputs, identity: Identity) -> Start:
    """What sets up the work on a worker, which may be on another machine."""
    card = model.card
    if Path(card.name).is_dir():  # a worker may have been started elsewhere
        card = replace(card, name=str(Path(card.name).absolute()))
    return partial(start_sigma_work, card, inputs, identity)


def _gap(gap: float | None, dtype: str) -> float | None:
    """The gap of a study: what was requested, or the default; None for bounds as they come."""
    if gap == math.inf or (gap is None and dtype != "float64"):
        return None
    if dtype == "float64":
        return float(GAP if gap is None else gap)
    raise UserError(
        f"gap limits upper / lower - 1, and {dtype} gives no upper bound; "
        "measure in float64 (--dtype float64), or omit gap"
    )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise UserError for settings of `measure` that are wrong for every model and text.

    Types are checked before anything runs, and not only when something fails: special_tokens="no"
    would count as True, and a seed of 0.5 would be used as it is.
    """
    check_arguments(measure, settings)
    for name in ("length", "layer", "head", "scope"):
        given = settings[f"{name}s"]
        if given is not None and not given:
            raise UserError(f"give at least one {name}")
    check_scope_names(settings["scopes"])
    samples = settings["samples"]
    tol = settings["tol"]
    gap = settings["gap"]
    seed = settings["seed"]
    if samples < 1:
        raise UserError(f"samples must be at least 1, got {samples}")
    if not 0 < tol < 1:
        raise UserError(f"tol, a relative residual, must lie between 0 and 1, got {tol}")
    check_gap(None if gap == math.inf else gap)
    if seed < 0:
        raise UserError(f"seed must not be negative, got {seed}")


def _as_list(given: Any) -> Any:
    """An array, a set or another iterable as a list; anything else as it is."""
    if isinstance(given, str | Sequence) or not isinstance(given, Iterable):
        return given
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _request(
    model: Model,
    inputs: Windows | WholeInputs,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    scopes: Sequence[str],
) -> tuple[Request, Survey]:
    """The request, and the trial on its shortest samples that shows the model supports it."""
    wanted = tuple(dict.fromkeys(scopes))
    model.check_scopes(wanted)
    chosen = range(model.layers) if layers is None else tuple(dict.fromkeys(layers))
    for layer in chosen:
        if not 0 <= layer < model.layers:
            raise UserError(
                f"layer {layer} does not exist: {model.card.name} has layers "
                f"0 to {model.layers - 1}"
            )
    model.check_heads(heads, chosen)
    groups = grouped(inputs.pairs)
    n, samples = groups[0]
    # Better an error now than a failed row for every sample after an hour.
    with threads_for(n * len(samples)):
        trial = survey(model, inputs, n, samples)
        numbers: dict[int, tuple[int, ...]] = {}
        for layer in chosen:
            sites = [trial.site(scope, layer, heads) for scope in wanted if scope != WHOLE_MODEL]
            numbers[layer] = tuple(
                dict.fromkeys(
                    head for site in sites for _, head in site.members if head is not None
                )
            )
        if WHOLE_MODEL in wanted:
            trial.site(WHOLE_MODEL)  # raises if the model has no such map
    return Request(groups=groups, layers=tuple(chosen), heads=numbers, scopes=wanted), trial


def _about(model: Model, inputs: Windows | WholeInputs, line: str) -> About:
    """The description of the study for its readers."""
    card = model.card
    return About(
        model=card.name,
        architecture=card.architecture,
        layers=model.layers,
        heads=model.heads,
        device=model.device.type,
        text=inputs.name,
        text_tokens=inputs.tokens,
        scopes={name: f"{scope.formula}: {scope.description}" for name, scope in SCOPES.items()},
        difference_to_eager=model.preflight.difference,
        # Only float64 solves have an upper bound, and with it a probability to fail.
        confidence=1 - Solver().failure if card.dtype == "float64" else 0.0,
        versions={"lipscope": __version__, "python": platform.python_version(), **card.versions},
        command=line,
        random_init=card.random_init,
    )


def _line(
    verb: Verb,
    model: Model,
    inputs: Windows | WholeInputs,
    request: Request,
    identity: Identity,
) -> str:
    """The command line that repeats the measurement; empty if only Python can."""
    if inputs.option is None or model.card.option is None:
        return ""
    lengths = sorted({n for n, _ in request.groups})
    heads = request.heads[request.layers[0]] if "heads" in request.scopes else ()
    options: dict[str, object] = {
        "--lengths": ",".join(map(str, lengths)),
        "--samples": len(inputs.pairs) // len(lengths),
        "--layers": ",".join(map(str, request.layers))
        if len(request.layers) < model.layers
        else None,
        "--heads": ",".join(map(str, heads)) if 0 < len(heads) < model.heads else None,
        "--tol": identity.tol,
        "--gap": math.inf if identity.gap is None and identity.dtype == "float64" else identity.gap,
        "--dtype": identity.dtype,
        "--seed": identity.seed,
    }
    last = [word for scope in request.scopes for word in ("--scope", scope)]
    last += ["--special-tokens"] if identity.special_tokens else []
    if verb.name != "measure":
        # Other commands fix the number of samples, the accuracy and the scope.
        fixed = ("--samples", "--tol", "--gap", *(("--lengths",) if verb.name == "attack" else ()))
        if options["--samples"] != 1 or options["--heads"] is not None:
            return ""  # only Python can ask for this
        options = {name: value for name, value in options.items() if name not in fixed}
        options = {**options, **verb.options}
        last = []
    words = ["lipscope", verb.name, *model.card.option, *inputs.option]
    words += [
        word for name, value in options.items() if value is not None for word in (name, str(value))
    ]
    return shlex.join(words + last)
