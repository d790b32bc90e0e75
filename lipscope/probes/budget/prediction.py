"""Predict the error of a model in low precision, and where it comes from."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._display import with_bar
from lipscope._types import UserError
from lipscope.models.model import Card
from lipscope.probes.budget.comparing import FALSE_ALARMS, state_tolerance
from lipscope.probes.budget.formats import Format, Quantiser, read_formats
from lipscope.probes.budget.jobs import (
    BudgetJob,
    Part,
    Settings,
    assemble,
    budget_header,
    budget_row,
    check_possible,
    part_rows,
    stored_parts,
    stored_worst,
)
from lipscope.probes.budget.metrics import (
    Measure,
    Metric,
    check_probes,
    degrees_of_freedom,
    largest_ratio,
    read_metric,
)
from lipscope.probes.budget.result import ErrorBudget
from lipscope.probes.budget.rounding import follow_run, squared_errors
from lipscope.probes.budget.sites import (
    ErrorSite,
    collect_products,
    exact_outputs,
    outputs_in,
    second_order,
)
from lipscope.probes.budget.subject import (
    Inputs,
    Sample,
    Source,
    Subject,
    Text,
    length_of,
    read_subject,
)
from lipscope.probes.budget.tracing import batches
from lipscope.probes.budget.worst import worst_cases
from lipscope.study.jobs import Command, Outcome, Request, check_engine, check_shard
from lipscope.study.probe import load_same, portable
from lipscope.study.reading import text_option
from lipscope.study.records import BUDGET, WORST_CASE, Fingerprint, Row
from lipscope.study.run import OpenEngine, command_line, engine_for, run_jobs
from lipscope.study.store import Kept, Store

PROBES = 16

SWITCHED = 0.01
"""Decisions (experts, tokens) taken otherwise are a site above this share of the error."""


@entry_point
@with_bar("propagating")
def error_budget(
    model: Source = None,
    text: Text = None,
    *,
    inputs: Inputs = None,
    formats: str | Iterable[str] | Mapping[str, Quantiser] = ("bf16", "int8"),
    probes: int = PROBES,
    metric: Measure = "output",
    observe: bool = False,
    length: int = 128,
    samples: int = 4,
    embeddings: bool = False,
    worst: bool = False,
    seed: int = 0,
    workers: int = 1,
    cluster: str | None = None,
    shard: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> ErrorBudget:
    """Predict what low precision costs, site by site, from a few backward passes.

    Every error is propagated to the output by the Jacobian of all that follows it. One backward
    pass per probe and sequence prices every site in every format at once; see
    docs/error_budgets.md for the formula and its variance. The model itself is never changed.

    Args:
        model: What :func:`lipscope.load` takes, a loaded :class:`Model`, or any module that takes
            token ids [1, n].
        text: A string, a file (``Path``), a list of these, or token ids [n] or [B, n]. Default:
            the embedded text.
        inputs: What the model reads in place of text, as for :func:`measure`: embeddings, pixel
            values, sound, or tensors for all its arguments by name; one row per sample.
        formats: Names, as a list or separated by commas: bf16, fp16 (the whole run), int8, int4:g
            (weights, in groups of g), fp8, w8a8, kv8, kv4; or {name: function} for weight formats
            of your own. A function takes a weight [out, in] and returns what is stored for it.
        probes: Backward passes per sequence. The relative standard error of a total is about
            1 / sqrt(2 probes sequences).
        metric: "output" for the relative error of the last hidden state, "kl" for the divergence
            of the next token's distribution in nats per token, or a differentiable function of the
            model's output, for the relative error of what it returns.
        observe: Whether to run every format as well.
        length: Maximum number of tokens per sequence.
        samples: Number of sequences taken from a text; each is a sample of its own.
        embeddings: Whether weight formats also apply to embeddings, and to a head that shares
            its weight with one.
        worst: Whether to bound sigma of all that follows each site from above as well, for an upper
            bound of the error to first order of weight and cache formats, in `budget.worst`. It
            takes longest.
        seed: Seed of the probes.
        workers: Number of worker processes on this machine; 1 works in this process.
        cluster: Workers on other machines, as for :func:`measure`.
        shard: (k, N): only the k-th of N parts of the sequences, as for :func:`measure`; the
            budget is of these.
        out: Directory of a study to save the budget in, one job per sequence; rerun to resume.
        progress: Called with the work done and the total work. Default: a bar in notebooks,
            nothing elsewhere.

    Returns:
        The predicted errors as an :class:`ErrorBudget`.

    Raises:
        UserError: If a format or the metric does not exist, or not for this model.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=4)
        >>> model = ls.load(LlamaModel(config), random_init=0)
        >>> budget = ls.error_budget(model, torch.arange(24), formats="int8,kv4", observe=True)
        >>> total = budget.total("int8")
        >>> total.low < budget.observed["int8"] < total.high
        True
    """
    check_probes(probes, least=2)
    check_engine(workers, cluster)
    wanted = read_formats(formats)
    measure = read_metric(metric)
    named = isinstance(metric, str) and not isinstance(formats, Mapping)
    if not named and (out is not None or workers > 1 or cluster is not None):
        raise UserError(
            "a saved budget needs formats and a metric with names: functions cannot be recognised "
            "when a run is resumed, or sent to workers; omit out and workers"
        )
    if worst and measure.divergence:
        raise UserError("the worst case is of the output, not of a divergence; omit worst")
    subject = read_subject(
        model, text, inputs=inputs, head=measure.head, length=length, samples=samples
    )
    settings = Settings(
        metric=measure.name, probes=probes, embeddings=embeddings, observe=observe, seed=seed
    )
    names = [f.name for f in wanted]
    work = BudgetWork(subject, wanted, measure, settings, with_rows=out is not None)
    store: Store | Kept = Kept()
    header: Any = None
    start: Any = None
    engine: OpenEngine = nullcontext
    if out is not None or workers > 1 or cluster is not None:
        line = _line(subject, text, settings, names, length, samples, worst)
        header = budget_header(subject, seed, line)
        assert subject.model is not None
        engine = engine_for(subject.model, workers, cluster)
        cpu = [x.cpu() if isinstance(x, Tensor) else x for x in subject.sequences]
        given = (portable(subject.model.card), header.identity, cpu, names, settings)
        start = partial(start_budget, *given, work.with_rows)
    if out is not None:
        # A budget has no jobs by layer and length; its line is noted, each different one once.
        empty = Request(groups=(), layers=(), heads={}, scopes=())
        command = Command(verb="budget", line=line, asked=empty, probe_prefix=f"{BUDGET} {line}")
        store = Store.create(Path(out), header, command)
    try:
        run_jobs(
            work,
            start,
            _jobs(store, subject, wanted, settings, worst),
            store,
            header,
            engine=engine,
            shard=None if shard is None else check_shard(shard),
            progress=progress,
        )
        found = stored_parts(store).get(settings, {})
        known = stored_worst(store, measure.name) if worst else {}
    finally:
        store.close()
    count = range(len(subject.sequences))
    parts = {f: [found[f][b] for b in count if b in found[f]] for f in names if f in found}
    return assemble(
        subject.name,
        settings,
        parts,
        measure,
        worst={name: known[name] for name in names if name in known},
        tolerance=lambda state, f: state_tolerance(subject, f, state, probes, seed),
    )


def _line(
    subject: Subject,
    text: Text,
    settings: Settings,
    formats: Sequence[str],
    length: int,
    samples: int,
    worst: bool,
) -> str:
    """The command line that computes a budget again; empty if only Python can."""
    if subject.model is None or not isinstance(subject.sequences[0], Tensor):
        return ""
    options = {
        "--format": ",".join(formats),
        "--metric": settings.metric,
        "--probes": settings.probes,
        "--length": length,
        "--samples": samples,
        "--dtype": subject.model.card.dtype,
        "--seed": settings.seed,
        "--observe": settings.observe,
        "--embeddings": settings.embeddings,
        "--worst": worst,
    }
    return command_line("budget", subject.model, text_option(text), options)


def _jobs(
    store: Store | Kept, subject: Subject, wanted: list[Format], settings: Settings, worst: bool
) -> list[BudgetJob]:
    """What the study lacks: the formats of each sequence, then the worst cases."""
    jobs = []
    for b, sample in enumerate(subject.sequences):
        n = length_of(sample)
        missing = [f.name for f in wanted if store.get(BUDGET, settings.key(b, n, f.name)) is None]
        if missing:
            jobs.append(BudgetJob(b=b, n=n, formats=tuple(missing)))
    if worst:
        known = stored_worst(store, settings.metric)
        missing = [f.name for f in wanted if f.name not in known]
        if missing:
            # Half of the work, however long it takes.
            weight = float(len(subject.sequences))
            n = length_of(subject.sequences[0])
            jobs.append(BudgetJob(b=0, n=n, formats=tuple(missing), worst=True, weight=weight))
    return jobs


@dataclass
class BudgetWork:
    """Prices sequences and bounds worst cases.

    with_rows: whether the numbers are also rows, for exports
    lows:      the model in the dtypes of formats, once it was needed there
    report:    tells which share of the current job is done
    """

    subject: Subject
    formats: list[Format]
    metric: Metric
    settings: Settings
    with_rows: bool
    lows: dict[str, Subject] = field(default_factory=dict)
    report: Callable[[float], None] = lambda share: None

    def __call__(self, job: BudgetJob) -> Outcome:
        wanted = [f for f in self.formats if f.name in job.formats]
        rows: list[Row] = []
        records: list[tuple[str, str, str]] = []
        if job.worst:
            name = self.metric.name
            bounds = worst_cases(
                self.subject, wanted, self.metric, lambda done, total: self.report(done / total)
            )
            for f, bound in bounds.items():
                records.append((WORST_CASE, json.dumps([name, f]), json.dumps(bound)))
                interval = (bound, bound, bound)
                rows.append(
                    budget_row(self.subject, f, job.n, 0, name, WORST_CASE, "total", interval)
                )
            return Outcome(job, tuple(rows), records=tuple(records))
        began = time.perf_counter()
        for f, part in _price_sequence(self, wanted, job.b).items():
            key = self.settings.key(job.b, part.n, f)
            records.append((BUDGET, key, json.dumps(part.as_json())))
            if self.with_rows:
                rows += part_rows(self.subject, f, part, job.b, self.metric)
        seconds = (time.perf_counter() - began) / max(len(rows), 1)
        rows = [row._replace(seconds=seconds) for row in rows]
        return Outcome(job, tuple(rows), records=tuple(records))


def start_budget(
    card: Card,
    identity: Fingerprint,
    sequences: Sequence[Sample],
    formats: Sequence[str],
    settings: Settings,
    with_rows: bool,
    threads: int,
) -> BudgetWork:
    """The same work, on a worker; raises UserError if the model is not the same there."""
    torch.set_num_threads(threads)
    metric = read_metric(settings.metric)
    model = load_same(card, identity, metric.head)
    first = sequences[0]
    subject = read_subject(
        model,
        first if isinstance(first, Tensor) else None,
        inputs=None if isinstance(first, Tensor) else first.arguments,
        head=metric.head,
        length=length_of(first),
        samples=1,
    )
    device = next(subject.module.parameters()).device
    rows = tuple(x.to(device) if isinstance(x, Tensor) else x for x in sequences)
    subject = replace(subject, sequences=rows)
    return BudgetWork(subject, read_formats(formats), metric, settings, with_rows)


def _price_sequence(work: BudgetWork, wanted: list[Format], b: int) -> dict[str, Part]:
    """The parts of some formats at sequence b."""
    sample = work.subject.sequences[b]
    subject = replace(work.subject, sequences=(sample,))
    metric = work.metric
    settings = work.settings
    probes = settings.probes
    # A seed of its own for every sequence, so that runs can resume at any of them.
    name = f"lipscope budget {settings.seed} {b}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    (exact,) = exact_outputs(subject, metric)
    stored = [f for f in wanted if f.dtype is None]
    embeddings = settings.embeddings
    products = collect_products(subject, stored, metric, probes, seed, embeddings) if stored else {}
    found = {}
    for f in wanted:
        low = subject
        if f.dtype is None:
            sites = products[f.name].sites
            q = products[f.name].t[:, 0]
            # At every sequence: a single token that goes to another expert may be most of it.
            curved = second_order(subject, f, metric, q.sum(dim=1), seed, embeddings)
        else:
            if f.name not in work.lows:
                work.lows[f.name] = work.subject.in_dtype(f.dtype)
            low = replace(work.lows[f.name], sequences=(sample,))
            sites, q, curved = _follow(subject, low, metric, probes, seed, exact)
        observed = None
        if settings.observe:
            (made,) = outputs_in(low, f, metric, embeddings=embeddings)
            observed = metric.squared(exact, made)
        found[f.name] = Part(
            sites=sites,
            q=q,
            summed=f.dtype is not None,
            curved=curved,
            observed=observed,
            size=metric.size(exact),
            n=subject.tokens,
        )
        check_possible(f, found[f.name], metric, metric.limit(exact))
    return found


def _follow(
    subject: Subject, low: Subject, metric: Metric, probes: int, seed: int, exact: Tensor
) -> tuple[list[ErrorSite], Tensor, tuple[float, float]]:
    """Sites of a run in a dtype, their sums [K, sites], and how linear its error is."""
    generator = torch.Generator().manual_seed(seed)
    run = follow_run(subject, low, subject.sequences[0])
    y = metric.read(run.output)
    # From a run of its own: the one that follows takes the same decisions (experts, clipping) as
    # the run in low precision, and an error that comes from another decision is not linear.
    low_y = metric.read(run.run[0]).detach().to(y.dtype)
    change = low_y - exact
    parts = []
    missed = made = together = 0.0
    for batch in batches(probes, [r.exact for r in run.roundings]):
        v = torch.stack([metric.probe(y, generator) for _ in batch])
        squares, linear = squared_errors([y], [v], run.roundings, aligned=True)
        parts.append(squares)
        seen = (v * change).reshape(len(v), -1).sum(dim=1).double().cpu()
        missed += float((seen - linear.sum(dim=1)).square().sum())
        made += float(seen.square().sum())
        together += float(linear.sum(dim=1).square().sum())
    by_site: dict[ErrorSite, Tensor] = {}
    squared_by_probe = torch.cat(parts)
    for r, squared in zip(run.roundings, squared_by_probe.T, strict=True):
        site = ErrorSite(r.name, r.layer, r.kind)
        by_site[site] = by_site.get(site, 0) + squared
    # What other decisions have changed is no rounding error of any operation, but it is known.
    switched = metric.squared(exact, y)
    if switched > SWITCHED**2 * sum(float(q.mean()) for q in by_site.values()):
        by_site[ErrorSite("other decisions", None, "decision")] = torch.full(
            (probes,), switched, dtype=torch.float64
        )
    # The same numbers are rounded alike: copies of a stream, a loop that has settled. The probes
    # show what the noted errors make together, and the error of the run with the same noise; that
    # error is known without. More than independent errors make by chance is a site.
    explained = metric.squared(exact, low_y) * (together / made if made else 0.0)
    q = squared_by_probe.sum(dim=1, keepdim=True)
    chance = largest_ratio(degrees_of_freedom(q), probes, 1 - FALSE_ALARMS)
    if explained > chance * float(q.mean()):
        by_site[ErrorSite("other repeats", None, "repeat")] = torch.full(
            (probes,), explained - float(q.mean()), dtype=torch.float64
        )
    return list(by_site), torch.stack(list(by_site.values()), dim=1), (missed, made)
