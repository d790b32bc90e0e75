"""Predict the error of a model in low precision, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lipscope._checks import check_positive
from lipscope._types import UserError
from lipscope.budget.formats import Format, Quantiser, read_formats
from lipscope.budget.intervals import Interval, of_squares, of_sums
from lipscope.budget.metrics import Measure, Metric, read_metric
from lipscope.budget.probing import batches
from lipscope.budget.result import BudgetRow, ErrorBudget
from lipscope.budget.rounding import follow_run, squared_errors
from lipscope.budget.running import distance, exact_outputs, outputs_in, second_order_share
from lipscope.budget.sites import ErrorSite, Products, collect_products
from lipscope.budget.states import state_tolerance
from lipscope.budget.subject import Source, Subject, Text, read_subject

PROBES = 16


def error_budget(
    model: Source = None,
    text: Text = None,
    *,
    formats: str | Iterable[str] | Mapping[str, Quantiser] = ("bf16", "int8"),
    probes: int = PROBES,
    metric: Measure = "output",
    observe: bool = False,
    length: int = 128,
    samples: int = 4,
    embeddings: bool = False,
    seed: int = 0,
) -> ErrorBudget:
    """Predict what low precision costs, site by site, from a few backward passes.

    Every error is propagated to the output by the Jacobian of all that follows it. One backward
    pass per probe and sequence prices every site in every format at once; see
    docs/error_budgets.md for the formula and its variance. The model itself is never changed.

    Args:
        model: What :func:`lipscope.load` takes, a loaded :class:`Model`, or any module that takes
            token ids [1, n].
        text: Text, the path of a text file, a list of texts, or token ids [n] or [B, n]. Default:
            the embedded text.
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
        embeddings: Whether weight formats also apply to a head that shares its weight with the
            embedding.
        seed: Seed of the probes.

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
    check_positive("probes", probes)
    if probes < 2:
        raise UserError("probes must be at least 2, one probe has no interval")
    wanted, measure = read_formats(formats), read_metric(metric)
    subject = read_subject(model, text, head=measure.head, length=length, samples=samples)
    exact = exact_outputs(subject, measure)
    size = sum(measure.size(y) for y in exact)
    stored = [f for f in wanted if f.dtype is None]
    products = (
        collect_products(subject, stored, measure, probes, seed, embeddings) if stored else {}
    )
    rows: list[BudgetRow] = []
    totals: dict[str, Interval] = {}
    curved: dict[str, float] = {}
    observed: dict[str, float] = {}
    for f in wanted:
        if f.dtype is None:
            found, totals[f.name] = _priced(products[f.name], f, measure, size)
            curved[f.name] = second_order_share(subject, f, measure)
        else:
            found, totals[f.name], curved[f.name] = _price_run(
                subject, f, measure, size, probes, seed
            )
        rows += found
        if observe:
            made = outputs_in(subject, f, measure, embeddings=embeddings)
            observed[f.name] = distance(measure, exact, made)
    return ErrorBudget(
        model=subject.name,
        metric=measure.name,
        rows=rows,
        totals=totals,
        observed=observed,
        second_order=curved,
        sequences=len(subject.sequences),
        tokens=subject.tokens,
        probes=probes,
        _tolerance=lambda state, f: state_tolerance(subject, f, state, probes, seed),
    )


def _priced(
    products: Products, f: Format, metric: Metric, size: float
) -> tuple[list[BudgetRow], Interval]:
    """The rows of a format and its total, errors of different sites added with their signs."""
    t = products.t
    shares = t.square().mean(dim=0).sum(dim=0)
    shares = shares / shares.sum().clamp_min(torch.finfo(shares.dtype).tiny)
    rows = [
        _row(site, f, metric.interval(of_squares(t[..., i]), size), float(shares[i]))
        for i, site in enumerate(products.sites)
    ]
    return rows, metric.interval(of_squares(t.sum(dim=-1)), size)


def _price_run(
    subject: Subject, f: Format, metric: Metric, size: float, probes: int, seed: int
) -> tuple[list[BudgetRow], Interval, float]:
    """The rows of a run in a dtype, its total, and the part of the error that is not linear."""
    assert f.dtype is not None
    low = subject.in_dtype(f.dtype)
    generator = torch.Generator().manual_seed(seed)
    sequences: list[dict[ErrorSite, Tensor]] = []
    missed = made = 0.0
    for ids in subject.sequences:
        run = follow_run(subject, low, ids)
        y = metric.read(run.output)
        change = metric.read(run.run[0]).detach().to(y.dtype) - y.detach()
        parts = []
        for batch in batches(probes, [r.exact for r in run.roundings]):
            v = torch.stack([metric.probe(y, generator) for _ in batch])
            squares, linear = squared_errors([y], [v], run.roundings)
            parts.append(squares)
            seen = (v * change).flatten(1).sum(dim=1).double().cpu()
            missed += float((seen - linear.sum(dim=1)).square().sum())
            made += float(seen.square().sum())
        by_site: dict[ErrorSite, Tensor] = {}
        for r, squared in zip(run.roundings, torch.cat(parts).T, strict=True):
            where = "other" if r.layer is None else f"layer {r.layer}"
            site = ErrorSite(f"{where} {r.kind}", r.layer, r.kind)
            by_site[site] = by_site.get(site, 0) + squared
        sequences.append(by_site)
    sites = list(dict.fromkeys(site for by_site in sequences for site in by_site))
    nothing = torch.zeros(probes, dtype=torch.float64)
    q = torch.stack(
        [torch.stack([s.get(site, nothing) for site in sites], dim=-1) for s in sequences], dim=1
    )  # [probes, sequences, sites]
    none = torch.zeros(q.shape[:2], dtype=q.dtype)
    means = q.mean(dim=0).sum(dim=0)
    shares = means / means.sum().clamp_min(torch.finfo(q.dtype).tiny)
    rows = [
        _row(site, f, metric.interval(of_sums(none, q[..., i]), size), float(shares[i]))
        for i, site in enumerate(sites)
    ]
    total = metric.interval(of_sums(none, q.sum(dim=-1)), size)
    return rows, total, (missed / made) ** 0.5 if made else 0.0


def _row(site: ErrorSite, f: Format, interval: Interval, share: float) -> BudgetRow:
    return BudgetRow(
        site=site.name,
        layer=site.layer,
        head=site.head,
        kind=site.kind,
        format=f.name,
        predicted=interval.value,
        low=interval.low,
        high=interval.high,
        observed=None,
        share=share,
    )
