"""Figures for papers and notebooks: matplotlib Axes in, Axes out."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

from lipscope._types import UserError
from lipscope.report.content import heat, layer_name, shown
from lipscope.study.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELLED_TOKENS = 80
"""Above this number of tokens, only the strongest twenty are labelled."""

COLOURS = "Blues"  # monotone lightness: readable in greyscale and by colour-blind eyes


def heatmap(study: Study, ax: Axes | None = None, n: int | None = None) -> Axes:
    """Median sigma over samples, layers by heads, at length n; by default the largest."""
    table, ax = heat(_measured(study)), _axes(ax)
    lengths = table["lengths"]
    if n is not None and n not in lengths:
        raise UserError(f"nothing was measured at n = {n}; choose one of {lengths}")
    at = len(lengths) - 1 if n is None else lengths.index(n)
    values = [
        [math.nan if cell is None else cell[0] for cell in line] for line in table["cells"][at]
    ]
    image = ax.imshow(values, aspect="auto", cmap=COLOURS, vmin=0)
    ax.set_xticks(
        range(len(table["columns"])), [name.removeprefix("head ") for name in table["columns"]]
    )
    ax.set_yticks(range(len(table["layers"])), table["layers"])
    ax.set_xlabel("head" if table["columns"][0].startswith("head") else "map")
    ax.set_title(f"{shown(study.info.about.model, 60)}, n = {lengths[at]}", parse_math=False)
    _figure(ax).colorbar(image, ax=ax, label="σ, median over samples")
    return ax


def growth(study: Study, ax: Axes | None = None, scope: str | None = None) -> Axes:
    """sigma against length on log axes: medians with ranges, the fit of each layer, and guides."""
    from matplotlib import colormaps

    scopes = list(dict.fromkeys(name for name, _ in _measured(study).maps))
    scope = scope or ("attention" if "attention" in scopes else scopes[0])
    if scope not in scopes:
        raise UserError(f"scope {scope} was not measured; choose one of {scopes}")
    ax, layers = _axes(ax), [layer for name, layer in study.maps if name == scope]
    lengths, lowest = sorted({row.n for row in study.sigma if row.scope == scope}), math.inf
    for i, layer in enumerate(layers):
        rows = study.largest(scope, layer)
        colour = colormaps["viridis"](0.85 * i / max(1, len(layers) - 1))
        at = sorted({row.n for row in rows})
        values = [[row.value for row in rows if row.n == n] for n in at]
        middle = [median(v) for v in values]
        spread = [
            [m - min(v) for m, v in zip(middle, values, strict=True)],
            [max(v) - m for m, v in zip(middle, values, strict=True)],
        ]
        law = study.law(scope, layer)
        label = layer_name(layer) + (
            f", α = {law.alpha:.2f} [{law.low:.2f}, {law.high:.2f}]" if law else ""
        )
        ax.errorbar(
            at,
            middle,
            spread,
            fmt="os^Dvx"[i % 6],
            color=colour,
            capsize=2,
            markersize=4,
            label=label,
        )
        ax.plot(at, [law(n) for n in at] if law else middle, color=colour, linewidth=1)
        lowest = min([lowest, *(min(v) for v in values if min(v) > 0)])
    _guides(ax, lengths, lowest)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, list(map(str, lengths)))
    ax.set_xlabel("n, tokens")
    ax.set_ylabel(f"σ, {shown(scope, 30)}", parse_math=False)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return ax


def tokens(
    study: Study, ax: Axes | None = None, layer: int | None = None, scope: str | None = None
) -> Axes:
    """The tokens of the sample of largest sigma, by input and output norm, in one layer."""
    peak = _measured(study).peak()
    layer = peak.layer if layer is None else layer
    found = study.tokens(layer, scope)
    ax = _axes(ax)
    image = ax.imshow(
        [[t.right for t in found], [t.left for t in found]], aspect="auto", cmap=COLOURS, vmin=0
    )
    ax.set_yticks([0, 1], ["input", "output"])
    named = found
    if len(found) > LABELLED_TOKENS:
        named = sorted(found, key=lambda t: -max(t.right, t.left))[:20]
    labels = ax.set_xticks(
        [t.position for t in named],
        [shown(t.token, 16) for t in named],
        rotation=90,
        fontsize="x-small",
    )
    # Tokens may contain dollar signs, which matplotlib would take for mathematics.
    for label in labels:
        label.label1.set_parse_math(False)
    ax.set_title(layer_name(layer))
    _figure(ax).colorbar(image, ax=ax, label="norm of the singular vector")
    return ax


def _guides(ax: Axes, lengths: list[int], lowest: float) -> None:
    if len(lengths) < 2 or math.isinf(lowest):
        return
    for power, name, style in ((0.25, "n^(1/4)", ":"), (0.5, "n^(1/2)", "--")):
        ax.plot(
            lengths,
            [0.8 * lowest * (n / lengths[0]) ** power for n in lengths],
            style,
            color="0.4",
            label=name,
        )


def _measured(study: Study) -> Study:
    if not study.sigma:
        raise UserError(
            "this study has no values to draw: its rows failed or were never measured; "
            "run lipscope measure on it again"
        )
    return study


def _axes(ax: Axes | None) -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError(
            "figures need matplotlib; install it with: pip install matplotlib"
        ) from error
    return plt.subplots()[1] if ax is None else ax


def _figure(ax: Axes) -> Any:
    return ax.figure
