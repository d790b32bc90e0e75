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
from typing import Any

from torch import Tensor

from lipscope import __version__
from lipscope._ambient import entry_point
from lipscope._checks import check_arguments
from lipscope._display import with_bar
from lipscope._types import UserError
from lipscope.linalg.certificate import check_gap
from lipscope.linalg.spectral import Solver
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.models.scopes import SCOPES, Scope, check_scope_names, per
from lipscope.models.sites import Survey
from lipscope.study.engines import Engine, Start, open_engine
from lipscope.study.jobs import (
    Command,
    Outcome,
    Request,
    Shard,
    attempt,
    check_engine,
    check_shard,
    grouped,
)
from lipscope.study.probe import (
    NUMERIC_VERSION,
    Place,
    Probe,
    ProbeWork,
    Sigma,
    config_digest,
    portable,
    start_probes,
    survey,
    threads_for,
)
from lipscope.study.ranks import RankEngine, open_rank_engine
from lipscope.study.reading import FixedInputs, SampledText, Text, read, sample_tokens
from lipscope.study.records import Description, Fingerprint, StudyHeader
from lipscope.study.store import Kept, Store
from lipscope.study.study import Study

Progress = Callable[[float, float], None]
"""Called with the work done and the total work, at the start and after every job."""

GAP = 0.1
"""How close the bounds of a float64 study are brought together by default."""

DEFAULTS: Mapping[str, Any] = {
    "lengths": None, "samples": 3, "layers": None, "heads": None, "scopes": ["heads", "attention"],
    "tol": 1e-6, "gap": None, "seed": 0, "special_tokens": False,
}  # fmt: skip
"""The settings of a measurement, with their defaults."""

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
        layers: Layer numbers, from 0: those of the model's blocks. Default: all layers with
            attention.
        heads: Head numbers, for the scope heads. Default: all heads.
        scopes: The maps to measure at each layer; see docs/scopes.md.
        tol: Relative residual at which a solve stops.
        gap: Keep iterating until upper / lower - 1 is at most this. Default: 0.1 in float64, the
            only dtype with upper bounds; ``math.inf`` takes them as they come. A row that cannot
            reach the gap says why in its status.
        seed: Seed for drawing samples and for the solver's random starts.
        workers: Number of worker processes on this machine; 1 measures in this process.
        cluster: Workers on other machines: the address of a dask scheduler, or a batch system and
            a number of its jobs ("slurm:64"); see docs/scaling.md.
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
    settings = {
        "lengths": lengths,
        "samples": samples,
        "layers": layers,
        "heads": heads,
        "scopes": [scopes] if isinstance(scopes, str) else scopes,
        "tol": tol,
        "gap": gap,
        "seed": seed,
        "special_tokens": special_tokens,
    }
    return run_measurement(
        model,
        text,
        settings,
        engine=engine_for(model, workers, cluster),
        shard=None if shard is None else check_shard(shard),
        out=out,
        inputs=inputs,
        progress=progress,
    )


def run_measurement(
    model: Model,
    text: Text,
    settings: Mapping[str, Any],
    *,
    engine: OpenEngine = nullcontext,
    shard: Shard | None = None,
    out: str | os.PathLike[str] | None = None,
    inputs: Tensor | Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
) -> Study:
    """`measure` with its settings in a table, and on an engine that may be open already."""
    given = read_inputs(model, text, settings, inputs)
    scopes = tuple(dict.fromkeys(settings["scopes"]))
    gap = gap_of(settings["gap"], model.card.dtype)
    return run(
        model,
        given,
        [Sigma(scopes, settings["tol"], gap, settings["seed"])],
        layers=settings["layers"],
        heads=settings["heads"],
        special_tokens=settings["special_tokens"],
        engine=engine,
        shard=shard,
        out=out,
        progress=progress,
    )


def engine_for(model: Model, workers: int, cluster: str | None) -> OpenEngine:
    """What opens the engine for a model, or raises UserError if workers cannot have the model."""
    if (workers > 1 or cluster is not None) and not model.owned:
        raise UserError(
            "a live module can only be measured in this process; use workers=1, or give its path"
        )
    if workers == 1 and cluster is None:
        return open_rank_engine() or nullcontext
    return partial(open_engine, workers, cluster)


def read_inputs(
    model: Model,
    text: Text,
    settings: Mapping[str, Any],
    inputs: Tensor | Mapping[str, Tensor] | None = None,
) -> SampledText | FixedInputs:
    """The samples of a study, after a check of all its settings."""
    settings = {name: _as_list(value) for name, value in {**DEFAULTS, **settings}.items()}
    check_settings(settings)
    with threads_for(tokens=1):
        return read(
            model,
            text,
            inputs,
            lengths=settings["lengths"],
            samples=settings["samples"],
            seed=settings["seed"],
            special_tokens=settings["special_tokens"],
        )


def run(
    model: Model,
    inputs: SampledText | FixedInputs,
    probes: Sequence[Probe],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    special_tokens: bool = False,
    verb: str = "measure",
    options: Mapping[str, object] | None = None,
    engine: OpenEngine = nullcontext,
    shard: Shard | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Study:
    """Call probes at the sites of a model, and keep their rows in a study.

    Args:
        model: The model.
        inputs: The samples.
        probes: The first is :class:`Sigma`, the others measure some of its scopes.
        layers: Layer numbers. Default: all.
        heads: Head numbers, for the scope heads. Default: all.
        special_tokens: Whether special tokens frame the samples.
        verb: The command on whose behalf the model is measured, for the study's list of commands.
        options: The options that only this command has.
        engine: Opens the engine that runs the jobs; None runs them in this process.
        shard: The part of the jobs to run. Default: all.
        out: Directory to save the study in, or to resume it in.
        progress: Called with the work done and the total work.
    """
    sigma = probes[0]
    assert isinstance(sigma, Sigma)
    request, trial = _request(model, inputs, layers, heads, probes)
    identity = Fingerprint(
        weights=model.card.weights,
        config=config_digest(model),
        revision=model.card.revision or "",
        tokenizer=model.card.tokenizer or "",
        text=inputs.digest,
        special_tokens=special_tokens,
        dtype=model.card.dtype,
        mask="the model's own; nothing is padded",
        tol=float(sigma.tol),
        seed=sigma.seed,
        numeric_version=NUMERIC_VERSION,
        gap=sigma.gap,
    )
    line = _line(verb, model, inputs, request, identity, options)
    command = Command(verb=verb, line=line, asked=request, probe_prefix=probes[-1].name)
    info = StudyHeader(identity, describe(model, inputs.name, inputs.tokens, line, SCOPES))
    store = Store.create(None if out is None else Path(out), info, command)
    by_name = {probe.name: probe for probe in probes}
    work = ProbeWork(model, inputs, by_name, surveyed=(request.groups[0], trial))
    try:
        jobs = [
            job
            for probe in probes
            for job in replace(request, scopes=probe.scopes).jobs(
                store.done(probe.name, probe.settings), probe.name, probe.cost
            )
        ]
        # Jobs of one group share a forward pass.
        jobs.sort(key=lambda job: (job.n, job.samples[0]))
        pairs = ((job.n, sample) for job in jobs for sample in job.samples)
        store.write_samples(sample_tokens(model, inputs, pairs))
        start = partial(start_probes, portable(model.card), inputs, identity, by_name)
        run_jobs(work, start, jobs, store, info, engine=engine, shard=shard, progress=progress)
    except BaseException:
        store.close()
        raise
    if store.directory is None:
        return Study(store)
    store.close()  # a study does not hold the lock of its directory
    return Study.open(store.directory)


def run_jobs(
    work: Any,
    start: Start | None,
    jobs: Sequence[Any],
    store: Store | Kept,
    info: StudyHeader | None,
    *,
    engine: OpenEngine = nullcontext,
    shard: Shard | None = None,
    progress: Progress | None = None,
) -> dict[Any, str]:
    """Run the jobs of a shard, in this process by `work` or on an engine, and store what they find.

    Every outcome is stored before the next one is requested. What is stored stays, whatever happens
    next; a KeyboardInterrupt passes with a note on how much that is and how to resume.

    Args:
        work: Does a job in this process; reports its progress to `work.report`.
        start: Sets up the same work on a worker; None if there is no engine.
        info: The header of the study; None if all errors end the run.

    Returns:
        The reasons of jobs that failed.
    """
    jobs = [job for job in jobs if shard is None or shard.has(job.place)]
    total = sum(job.weight for job in jobs)
    done = 0.0
    kept = 0
    failed: dict[Any, str] = {}

    def tell(share: float) -> None:
        if progress is not None:
            # Only work in this process reports shares of a job, and it does jobs in their order.
            current = jobs[kept].weight if share else 0.0
            progress(done + min(share, 1.0) * current, total)

    try:
        with engine() if jobs else nullcontext() as running:
            outcomes: Generator[Outcome]
            if running is None:
                work.report = tell
                # Fatal errors keep their traceback.
                outcomes = (work(job) if job.fatal else attempt(work, job) for job in jobs)
            else:
                assert start is not None
                outcomes = running.run(start, jobs)
            tell(0.0)
            with closing(outcomes):  # on any error the workers end now, not at exit
                for job, rows, sensitivities, failure, records in outcomes:
                    if failure is not None and job.fatal:
                        raise UserError(failure)
                    if failure is not None:
                        failed[job] = failure
                        assert info is not None
                        rows = job.failed_rows(failure, info.identity.dtype, info.about.device)
                    store.write(rows, sensitivities, records)
                    done = done + job.weight
                    kept = kept + 1
                    tell(0.0)
    except KeyboardInterrupt as stop:
        stop.add_note(
            "Stopped; nothing was saved, because no --out directory was given."
            if store.directory is None
            else f"Stopped; {kept} of {len(jobs)} jobs are saved in {store.directory}. "
            "Run the same command again to resume."
        )
        raise
    return failed


def gap_of(gap: float | None, dtype: str) -> float | None:
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
    inputs: SampledText | FixedInputs,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    probes: Sequence[Probe],
) -> tuple[Request, Survey]:
    """The request, and the trial on its shortest samples that shows the model supports it."""
    scopes = probes[0].scopes
    layers = _as_list(layers)
    heads = _as_list(heads)
    model.check_scopes(scopes)
    chosen = model.attending if layers is None else tuple(dict.fromkeys(layers))
    model.check_layers(chosen, model.card.name)
    model.check_heads(heads, chosen)
    groups = grouped(inputs.pairs)
    n, samples = groups[0]
    # Better an error now than a failed row for every sample after an hour.
    with threads_for(n * len(samples)):
        trial = survey(model, inputs, n, samples)
        numbers: dict[int, tuple[int, ...]] = {}
        whole = [scope for scope in scopes if per(scope) == "model"]
        for layer in chosen:
            sites = [trial.site(scope, layer, heads) for scope in scopes if scope not in whole]
            numbers[layer] = tuple(
                dict.fromkeys(
                    head for site in sites for _, head in site.members if head is not None
                )
            )
            for site in sites:
                place = Place(site=site, n=n, samples=samples, model=model, inputs=inputs)
                for probe in probes:
                    if site.scope in probe.scopes:
                        probe.check(place)
        for scope in whole:
            trial.site(scope)  # raises if the model has no such map
    return Request(groups=groups, layers=chosen, heads=numbers, scopes=scopes), trial


def describe(
    model: Model, text: str, tokens: int, line: str, scopes: Mapping[str, Scope]
) -> Description:
    """The description of a study for its readers."""
    card = model.card
    return Description(
        model=card.name,
        architecture=card.architecture,
        layers=model.layers,
        heads=model.heads,
        device=model.device.type,
        text=text,
        text_tokens=tokens,
        scopes={name: f"{scope.formula}: {scope.description}" for name, scope in scopes.items()},
        difference_to_eager=model.preflight.difference,
        # Only float64 solves have an upper bound, and with it a probability to fail.
        confidence=1 - Solver().failure if scopes and card.dtype == "float64" else 0.0,
        versions={"lipscope": __version__, "python": platform.python_version(), **card.versions},
        command=line,
        random_init=card.random_init,
    )


def command_line(
    verb: str, model: Model, text: Sequence[str] | None, options: Mapping[str, object]
) -> str:
    """The command line that repeats a run; empty if only Python can.

    Args:
        verb: The command.
        model: The model.
        text: The words that give the text; None if a command line cannot give it.
        options: Values by option: None and False leave it out, True is a flag, a tuple repeats it.
    """
    if text is None or model.card.option is None:
        return ""
    words = ["lipscope", verb, *model.card.option, *text]
    for name, value in options.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one is True:
                words.append(name)
            elif one is not None and one is not False:
                words += [name, str(one)]
    return shlex.join(words)


def _line(
    verb: str,
    model: Model,
    inputs: SampledText | FixedInputs,
    request: Request,
    identity: Fingerprint,
    own: Mapping[str, object] | None,
) -> str:
    """The command line of a study; other commands than measure fix what their options lack."""
    lengths = sorted({n for n, _ in request.groups})
    samples = len(inputs.pairs) // len(lengths)
    heads = request.heads[request.layers[0]] if "head" in map(per, request.scopes) else ()
    some = ",".join(map(str, heads)) if 0 < len(heads) < model.heads else None
    if verb != "measure" and (samples != 1 or some is not None):
        return ""  # only Python can ask for this
    layers = (
        ",".join(map(str, request.layers)) if len(request.layers) < len(model.attending) else None
    )
    options: dict[str, object] = {
        "--lengths": ",".join(map(str, lengths)),
        "--samples": samples,
        "--layers": layers,
        "--heads": some,
        "--tol": identity.tol,
        "--gap": math.inf if identity.gap is None and identity.dtype == "float64" else identity.gap,
        "--dtype": identity.dtype,
        "--seed": identity.seed,
        "--scope": request.scopes,
        "--special-tokens": identity.special_tokens,
    }
    if own is not None:
        shared = (*(() if "--length" in own else ("--lengths",)), "--layers", "--dtype", "--seed")
        options = {name: options[name] for name in shared} | dict(own)
    return command_line(verb, model, inputs.option, options)
