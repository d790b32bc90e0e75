"""The report of a study: one self-contained HTML page, with a reference study beside it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from lipscope._checks import name_bad_argument
from lipscope._types import UserError
from lipscope.report import words
from lipscope.report.comparison import comparison_html, digest, labels
from lipscope.report.content import (
    Heat,
    Strip,
    columns,
    heat,
    length_curves,
    require_drawable,
    strips,
)
from lipscope.report.document import Page, command, section, write
from lipscope.report.formats import counted, shown
from lipscope.report.study_charts import (
    growth_part,
    heat_chart,
    main_scope,
    ranking,
    token_data,
    token_part,
)
from lipscope.study.records import BUDGET, OBSERVED, SIGMA, WORST_CASE
from lipscope.study.study import Study

SHORT = 64
"""The length at which bounds are suggested: the search for the worst input takes long beyond."""

OF_BUDGETS = (BUDGET, OBSERVED, WORST_CASE)

NO_BOUNDS = (
    "σ is local: another text, or a longer one, may give a larger value. This study contains no "
    "bounds and no search for the worst input."
)


@name_bad_argument
def write_report(
    study: Study | Sequence[Study], path: str | os.PathLike[str], against: Study | None = None
) -> Path:
    """Write a study as one self-contained HTML page, or compare several on one.

    The page needs no network and loads nothing. The file is written completely or not at all.

    Args:
        study: The study; a list of studies is compared.
        path: File to write.
        against: A second study whose values are shown as reference, for example the same
            architecture with random weights.

    Returns:
        The path of the page.

    Example:
        >>> import tempfile
        >>> import lipscope as ls
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
        >>> config = LlamaConfig(vocab_size=9, num_attention_heads=1, **sizes)
        >>> model = LlamaModel(config).double()
        >>> study = ls.measure(model, torch.arange(8)[None], lengths=(4,), samples=1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     page = ls.write_report(study, f"{directory}/report.html")
        ...     page.read_text()[:15]
        '<!doctype html>'
    """
    if isinstance(study, Study):
        return write(html(study, against), path, typed=True)
    if against is not None:
        raise UserError("a list of studies is compared already; omit against, or give one study")
    return write(comparison_html([digest(one) for one in study]), path, typed=True)


def html(study: Study, against: Study | None = None) -> str:
    """The report of a study as a string; values of the other study stand beside it."""
    for one in (study, against):
        if one is not None:
            require_drawable(one)
    about = study.info.about
    identity = study.info.identity
    data: dict[str, object] = {"table": columns(study)}
    priced = any(row.probe.startswith(BUDGET) for row in study.rows)
    smooth = section("smooth", "How smooth is this model?", *_smooth(study, against))
    body = [] if priced and not study.sigma else [smooth]
    if study.sigma:
        found = heat(study)
        every = strips(study)
        data["heat"] = {
            "label": "length n",
            "names": [f"{n:,}" for n in found.lengths],
            "frames": [grid.frame() for grid in found.grids],
        }
        if every:
            data["tokens"] = token_data(every, _first(study, every))
        body += _measured(study, against, found, every)
    if priced:
        # Late: adding up the parts of a budget imports torch.
        from lipscope.probes.budget.jobs import stored_budgets
        from lipscope.report.budgets import budget_section

        body += [budget_section(budget, i) for i, budget in enumerate(stored_budgets(study))]
    body += [
        section("sure", "How sure are we?", words.describe_certainty(study), _facts(study)),
        section(
            "table",
            "Every number",
            f"{counted(len(study.rows), 'row')}, to six digits; lipscope export writes them in "
            "full.",
            '<div class="part" data-part="table"></div>',
        ),
    ]
    return Page(
        title=shown(about.model, 80),
        kind="lipscope report",
        subtitle=f"{shown(about.architecture, 80)} on {shown(about.text, 80)}, "
        f"{shown(identity.dtype, 20)}",
        headline=" ".join(filter(None, (words.headline(study), words.warning(study)))),
        body="".join(body),
        data=data,
        tiles=words.tiles(study),
    ).html()


def _smooth(study: Study, against: Study | None) -> tuple[str, ...]:
    """The answer to the first question; with the reference, or the command that measures one."""
    text = words.describe_sigma(study)
    if not study.sigma:
        return (text,)
    row, layers = words.most_sensitive(study)
    if against is not None:
        # At the length of the headline, for sigma of different lengths does not compare.
        theirs = words.medians(length_curves(against), row.scope, row.n)
        return (f"{text}\n{words.describe_reference(layers, theirs, labels([study, against])[1])}",)
    told = _told(study)
    # Random weights have no reference of their own: they are one.
    if told[:2] != ["lipscope", "measure"] or study.info.about.random_init is not None:
        return (text,)
    place = _directory(study)
    measure = shlex.join([*told, "--random-init", "0", "--out", f"{place}-random"])
    report = shlex.join(["lipscope", "report", place, f"{place}-random"])
    ask = (
        "Is that much? Compare it with the same architecture with random weights: these commands "
        "measure them and write this report with both."
    )
    return f"{text}\n{ask}", command(f"{measure}\n{report}")


def _measured(
    study: Study, against: Study | None, found: Heat, every: Sequence[Strip]
) -> list[str]:
    """The sections that need values."""
    curves = length_curves(study)
    strip = token_part(_first(study, every)) if every else ""
    row = study.peak()
    others = [] if against is None else length_curves(against)
    name = "" if against is None else labels([study, against])[1]
    scope = main_scope([curve.scope for curve in curves])
    reference = words.medians(others, scope, row.n)
    return [
        section(
            "rough",
            "Where is it most sensitive?",
            words.describe_layers(study),
            f'<div class="part" data-part="frames" data-frames="heat">{heat_chart(found)}</div>',
            f"<h3>Layers by sensitivity ({escape(shown(scope, 30))}, n = {row.n:,})</h3>",
            ranking([c for c in curves if c.scope == scope], row.n, reference, name),
        ),
        section(
            "growth",
            "How does that grow with length?",
            words.describe_growth(study),
            growth_part(curves, others, name),
        ),
        section("tokens", "Which tokens carry it?", words.describe_tokens(study), strip),
        section("worst", "How far is it from the worst case?", *_worst(study)),
    ]


def _worst(study: Study) -> tuple[str, str]:
    """How far sigma is from its bounds, in words and as a chart; or the command that adds them."""
    if any(not row.probe.startswith((SIGMA, *OF_BUDGETS)) for row in study.rows):
        # Late: the theorems import torch, which a study without bounds does not need.
        from lipscope.report.bounds import bounds_part, describe_worst_case, surrounded

        found = surrounded(study)
        if found:
            return describe_worst_case(found), bounds_part(found)
    told = _told(study)
    if not told:  # the input was not a text
        return NO_BOUNDS, ""
    keep = ("--text", "--column", "--tokenizer", "--revision", "--random-init", "--dtype", "--seed")
    # Bounds join the study only if they are about the same weights, text and precision.
    options = [w for i, w in enumerate(told) if w in keep or (i and told[i - 1] in keep)]
    lengths = sorted({row.n for row in study.sigma})
    length = max((n for n in lengths if n <= SHORT), default=lengths[0])
    model = told[2:3] if told[:2] == ["lipscope", "measure"] else []
    # Theorems are checked on plain text: with special tokens, they need a study of their own.
    place = _directory(study) + ("-bounds" if study.info.identity.special_tokens else "")
    words = ["lipscope", "bounds", *model, *options, "--lengths", str(length), "--out", place]
    return NO_BOUNDS, f"<p>This command adds them:</p>{command(shlex.join(words))}"


def _first(study: Study, every: Sequence[Strip]) -> Strip:
    """The strip of the largest sigma, or else the first one."""
    row = study.peak()
    return next((strip for strip in every if strip.row[1:4] == row[1:4]), every[0])


def _told(study: Study) -> list[str]:
    """The words of the command that made a study; none if it is no command line."""
    try:
        return shlex.split(next(iter(study.commands), ""))
    except ValueError:  # a quotation without an end
        return []


def _directory(study: Study) -> str:
    """The study's directory as it was given, or its name: a page is forwarded to other machines."""
    where = study.directory
    return "DIR" if where is None else str(where.name if where.is_absolute() else where)


def _facts(study: Study) -> str:
    """Reasons for failure, the measured maps, and the settings that the numbers depend on."""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in words.failures(study))
    found = f"<h3>Rows without a value</h3><ul>{reasons}</ul>" if reasons else ""
    identity = study.info.identity
    about = study.info.about
    measured = [row for row in study.rows if not row.probe.startswith(OF_BUDGETS)]
    scopes = dict.fromkeys(row.scope for row in measured)
    maps = _listed({shown(name, 30): about.scopes.get(name, "not described") for name in scopes})
    found += f'<h3>Which maps were measured</h3><dl class="facts">{maps}</dl>' if maps else ""
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    settings = {
        "model": f"{about.model} ({about.architecture}, {about.layers} layers, "
        f"{about.heads} heads)",
        "revision": identity.revision or "none",
        "weights": identity.weights,
        "configuration": identity.config,
        "tokenizer": identity.tokenizer or "none",
        "text": f"{about.text}, {about.text_tokens:,} tokens"
        + (", special tokens" if identity.special_tokens else ""),
        "text hash": identity.text,
        "mask": identity.mask,
        "dtype and device": f"{identity.dtype}, {about.device}",
        "tolerance and seed": f"{identity.tol:g}, {identity.seed}",
        "gap": "none requested" if identity.gap is None else f"{identity.gap:g}",
        "versions": versions,
    }
    told = "\n".join(shown(line, 2000) for line in study.commands)
    again = command(told) if told else "<p>The input was not a text.</p>"
    return (
        f'{found}<h3>What was measured</h3><dl class="facts box">{_listed(settings)}</dl>'
        f"<h3>Command to repeat the measurement</h3>{again}"
    )


def _listed(facts: Mapping[str, str]) -> str:
    """Names and values as the items of a definition list."""
    return "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(shown(value, 400))}</dd>"
        for name, value in facts.items()
    )
