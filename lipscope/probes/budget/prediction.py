"""Predict the error of a model in low precision, and where it comes from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._notebook_bar import with_bar
from lipscope._types import UserError
from lipscope.probes.budget.comparing import FALSE_ALARMS, state_tolerance
from lipscope.probes.budget.formats import Format, Quantiser, read_formats
from lipscope.probes.budget.metrics import (
    Measure,
    Metric,
    check_probes,
    degrees_of_freedom,
    largest_ratio,
    read_metric,
)
from lipscope.probes.budget.parts import Part, check_possible
from lipscope.probes.budget.result import ErrorBudget
from lipscope.probes.budget.rounding import follow_run, squared_errors
from lipscope.probes.budget.sites import (
    ErrorSite,
    collect_products,
    exact_outputs,
    outputs_in,
    second_order,
)
from lipscope.probes.budget.storing import BudgetStore, Settings, assemble, command_line
from lipscope.probes.budget.subject import Inputs, Source, Subject, Text, length_of, read_subject
from lipscope.probes.budget.tracing import batches
from lipscope.probes.budget.worst import worst_cases

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
    wanted = read_formats(formats)
    measure = read_metric(metric)
    if out is not None and not (isinstance(metric, str) and not isinstance(formats, Mapping)):
        raise UserError(
            "a saved budget needs formats and a metric with names: functions cannot be recognised "
            "when a run is resumed; omit out"
        )
    if worst and measure.divergence:
        raise UserError("the worst case is of the output, not of a divergence; omit worst")
    subject = read_subject(
        model, text, inputs=inputs, head=measure.head, length=length, samples=samples
    )
    settings = Settings(
        metric=measure.name, probes=probes, embeddings=embeddings, observe=observe, seed=seed
    )
    store = None
    if out is not None:
        line = command_line(
            subject,
            text,
            settings,
            [f.name for f in wanted],
            length,
            samples,
            worst,
        )
        store = BudgetStore(Path(out), subject, seed, line)
    parts: dict[str, list[Part]] = {f.name: [] for f in wanted}
    total = len(subject.sequences) * (2 if worst else 1)
    report = progress or (lambda done, total: None)
    report(0, total)  # from here on, time is what the work takes
    try:
        for b, found in enumerate(_jobs(subject, wanted, measure, settings, store)):
            for name, part in found.items():
                parts[name].append(part)
            report(b + 1, total)
        conspired = _worst(subject, wanted, measure, store, report) if worst else {}
    finally:
        if store is not None:
            store.close()
    return assemble(
        subject.name,
        settings,
        parts,
        measure,
        worst=conspired,
        tolerance=lambda state, f: state_tolerance(subject, f, state, probes, seed),
    )


def _worst(
    subject: Subject,
    wanted: list[Format],
    metric: Metric,
    store: BudgetStore | None,
    progress: Callable[[float, float], None],
) -> dict[str, float]:
    """The worst cases of all formats that have one: stored ones, or new ones, then stored."""
    found = {} if store is None else store.worst(metric.name)
    missing = [f for f in wanted if f.name not in found]
    # The second half of the work, however long it takes.
    made = worst_cases(subject, missing, metric, lambda done, total: progress(1 + done / total, 2))
    if store is not None and made:
        store.write_worst(metric.name, made)
    return {f.name: {**found, **made}[f.name] for f in wanted if f.name in found or f.name in made}


def _jobs(
    subject: Subject,
    wanted: list[Format],
    metric: Metric,
    settings: Settings,
    store: BudgetStore | None,
) -> Iterator[dict[str, Part]]:
    """The parts of all formats, sequence by sequence: stored ones, or new ones, then stored."""
    lows: dict[str, Subject] = {}
    for b, sample in enumerate(subject.sequences):
        found = {} if store is None else store.parts(settings, b, length_of(sample), wanted)
        missing = [f for f in wanted if f.name not in found]
        if missing:
            for f in missing:
                if f.dtype is not None and f.name not in lows:
                    lows[f.name] = subject.in_dtype(f.dtype)
            began = time.perf_counter()
            one = replace(subject, sequences=(sample,))
            made = _price_sequence(one, missing, metric, settings, b, lows)
            if store is not None:
                store.write(settings, b, made, metric, time.perf_counter() - began)
            found |= made
        yield {f.name: found[f.name] for f in wanted}


def _price_sequence(
    subject: Subject,
    wanted: list[Format],
    metric: Metric,
    settings: Settings,
    b: int,
    lows: Mapping[str, Subject],
) -> dict[str, Part]:
    """The parts of some formats at sequence b, the only one of `subject`."""
    probes = settings.probes
    seed = settings.seed_of(b)
    (exact,) = exact_outputs(subject, metric)
    stored = [f for f in wanted if f.dtype is None]
    embeddings = settings.embeddings
    products = collect_products(subject, stored, metric, probes, seed, embeddings) if stored else {}
    found = {}
    for f in wanted:
        if f.dtype is None:
            sites = products[f.name].sites
            q = products[f.name].t[:, 0]
            # At every sequence: a single token that goes to another expert may be most of it.
            curved = second_order(subject, f, metric, q.sum(dim=1), seed, embeddings)
        else:
            sites, q, curved = _follow(subject, lows[f.name], metric, probes, seed, exact)
        observed = None
        if settings.observe:
            low = subject if f.dtype is None else replace(lows[f.name], sequences=subject.sequences)
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
