"""The report: one self-contained HTML page with data, charts and a content security policy."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lipscope._files import whole_file
from lipscope.report import words
from lipscope.report.comparison import comparison, differences, verdict
from lipscope.report.content import content, shown
from lipscope.report.encoding import as_json
from lipscope.study.study import Study

SCRIPTS = ("core.js", "charts.js", "tokens.js", "table.js", "comparison.js", "main.js")
EMPTY_STYLE = ""  # plotly adds an empty style element and fills it rule by rule
MAP_STYLE = re.compile(r'getElementById\("([0-9a-f]{64})"\)')


@dataclass(frozen=True)
class Section:
    """A question, its answer in words, and the charts below it, for each study."""

    name: str
    question: str
    answer: Callable[[Study], str]
    parts: tuple[str, ...] = ()
    needs_values: bool = True


SECTIONS = (
    Section(
        name="smooth",
        question="How smooth is this model?",
        answer=words.smooth,
        parts=(),
        needs_values=False,
    ),
    Section(
        name="rough", question="Where is it most sensitive?", answer=words.rough, parts=("heat",)
    ),
    Section(
        name="growth",
        question="How does that grow with length?",
        answer=words.growth,
        parts=("growth",),
    ),
    Section(
        name="tokens", question="Which tokens carry it?", answer=words.tokens, parts=("tokens",)
    ),
    Section(
        name="worst",
        question="How far is it from the worst case?",
        answer=words.worst,
        parts=("bounds",),
    ),
    Section(
        name="sure",
        question="How sure are we?",
        answer=words.sure,
        parts=("facts",),
        needs_values=False,
    ),
    Section(
        name="table",
        question="Every number",
        answer=lambda study: (
            f"{words.rows_of(study)}, to six digits; `lipscope export` writes them in full."
        ),
        parts=("table",),
        needs_values=False,
    ),
)


def render(study: Study, path: str | os.PathLike[str], against: Study | None = None) -> Path:
    """Write a study, or two side by side, as one self-contained HTML page.

    The page needs no network and loads nothing. The file is written completely or not at all.

    Args:
        study: The study.
        path: File to write.
        against: A second study to compare with.

    Returns:
        The path of the page.

    Example:
        >>> import tempfile
        >>> import lipscope as ls
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> model = LlamaModel(
        ...     LlamaConfig(
        ...         vocab_size=9,
        ...         hidden_size=4,
        ...         intermediate_size=4,
        ...         num_hidden_layers=1,
        ...         num_attention_heads=1,
        ...     )
        ... ).double()
        >>> study = ls.measure(model, torch.arange(8)[None], lengths=(4,), samples=1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     page = ls.render(study, f"{directory}/report.html")
        ...     page.read_text()[:15]
        '<!doctype html>'
    """
    goal, page = Path(path), html([study] if against is None else [study, against])
    with whole_file(goal) as draft:
        draft.write_text(page, encoding="utf-8", newline="")
    return goal


def html(studies: Sequence[Study]) -> str:
    """The page as a string."""
    from plotly.offline import get_plotlyjs

    style, charts, script = (
        _template("page.css"),
        get_plotlyjs(),
        "\n".join(map(_template, SCRIPTS)),
    )
    data: dict[str, Any] = {"studies": [content(study) for study in studies]}
    names = [shown(study.info.about.model, 80) for study in studies]
    lead, body = (
        words.headline(studies[0]),
        "".join(_section(section, studies) for section in SECTIONS),
    )
    if len(studies) == 2:
        data["comparison"] = comparison(*studies)
        lead, body = verdict(*studies), _comparison(*studies) + body
    return Template(_template("page.html")).substitute(
        policy=_policy([script, charts], [style, EMPTY_STYLE]),
        title=escape(" against ".join(names)),
        subtitle=escape(", ".join(_subtitle(study) for study in studies)),
        headline=escape(lead),
        tiles=_tiles(studies[0]) if len(studies) == 1 else "",
        body=body,
        style=style,
        unneeded=_unneeded(charts),
        data=as_json(data),
        charts=charts,
        script=script,
    )


def _template(name: str) -> str:
    return (files("lipscope.report") / "template" / name).read_text(encoding="utf-8")


def _unneeded(charts: str) -> str:
    """Placeholders for the style elements of geographical maps."""
    # Plotly adds the style elements that it does not find, which the policy forbids.
    return "".join(
        f'<template id="{name}"></template>' for name in sorted(set(MAP_STYLE.findall(charts)))
    )


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A policy under which only this page's own scripts run, by hash, and nothing is loaded."""

    def hashes(texts: Sequence[str]) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(scripts)}; style-src-elem {hashes(styles)}; "
        "style-src-attr 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _subtitle(study: Study) -> str:
    about, identity = study.info.about, study.info.identity
    return (
        f"{shown(about.architecture, 80)} on {shown(about.text, 80)}, {shown(identity.dtype, 20)}"
    )


def _tiles(study: Study) -> str:
    items = "".join(
        f"<li><span>{escape(what)}</span><strong>{escape(number)}</strong>"
        f"<span>{escape(where)}</span></li>"
        for what, number, where in words.tiles(study)
    )
    return f'<ul class="tiles">{items}</ul>' if items else ""


def _section(section: Section, studies: Sequence[Study]) -> str:
    shown_for = [i for i, study in enumerate(studies) if study.sigma or not section.needs_values]
    if not shown_for:
        return ""
    panes = "".join(_pane(section, studies[i], i, len(studies) > 1) for i in shown_for)
    kind = "panes two" if len(studies) > 1 else "panes"
    return (
        f'<section id="{section.name}"><h2>{escape(section.question)}</h2>'
        f'<div class="{kind}">{panes}</div></section>'
    )


def _pane(section: Section, study: Study, index: int, named: bool) -> str:
    name = (
        f"<h3>{'second: ' if index else 'first: '}{escape(shown(study.info.about.model, 60))}</h3>"
        if named
        else ""
    )
    parts = "".join(
        _facts(study)
        if part == "facts"
        else f'<div class="part" data-part="{part}" data-study="{index}"></div>'
        for part in section.parts
    )
    answer = escape(section.answer(study))
    return f'<div class="pane">{name}<p class="answer">{answer}</p>{parts}</div>'


def _facts(study: Study) -> str:
    """Reasons for failure, the measured maps, and the settings that the numbers depend on."""
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in words.failures(study))
    found = f"<h3>Rows without a value</h3><ul>{reasons}</ul>" if reasons else ""
    measured = dict.fromkeys(row.scope for row in study.rows)
    known = study.info.about.scopes
    maps = "".join(
        f"<dt>{escape(shown(scope, 30))}</dt>"
        f"<dd>{escape(shown(known.get(scope, 'not described'), 400))}</dd>"
        for scope in measured
    )
    found += f'<h3>Which maps were measured</h3><dl class="facts">{maps}</dl>' if maps else ""
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _box(study)
    )
    command = study.info.about.command
    again = (
        f"<pre>{escape(shown(command, 2000))}</pre>"
        if command
        else "<p>The input was not a text.</p>"
    )
    return (
        f'{found}<h3>What was measured</h3><dl class="facts box">{facts}</dl>'
        f"<h3>Command to repeat the measurement</h3>{again}"
    )


def _box(study: Study) -> list[tuple[str, str]]:
    identity, about = study.info.identity, study.info.about
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    facts = {
        "model": f"{about.model} ({about.architecture}, {about.layers} layers, "
        f"{about.heads} heads)",
        "revision": identity.revision or "none",
        "weights": identity.weights,
        "configuration": identity.config,
        "tokenizer": identity.tokenizer or "none",
        "text": f"{about.text}, {about.text_tokens} tokens"
        + (", special tokens" if identity.special_tokens else ""),
        "text hash": identity.text,
        "mask": identity.mask,
        "dtype and device": f"{identity.dtype}, {about.device}",
        "tolerance and seed": f"{identity.tol:g}, {identity.seed}",
        "gap": "none requested" if identity.gap is None else f"{identity.gap:g}",
        "versions": versions,
    }
    return [(name, shown(value, 400)) for name, value in facts.items()]


def _comparison(first: Study, second: Study) -> str:
    changed = ", ".join(differences(first, second)) or "none, the model and the text are the same"
    return (
        '<section id="comparison"><h2>What is different?</h2><div class="panes"><div class="pane">'
        f'<p class="answer">{escape(verdict(first, second))}</p>'
        f"<p>Settings that differ: {escape(changed)}.</p>"
        '<div class="part" data-part="comparison" data-study="0"></div></div></div></section>'
    )
