"""Castin et al., figures on real text: the constant of two layers over length and over radius.

Windows of a text pass through a model; at layers 0 and 6 the constant of the attention map is
measured at the tokens that arrive there. The released scripts plot sqrt(||J' f(X)||), because they
take the output of `jvp` for its tangent; both numbers are measured here, side by side, for the map
that the scripts differentiate and for the map that the paper describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import SelfAttention
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.local import local_lipschitz
from lipscope.models.model import Model
from lipscope.models.sites import Site
from lipscope.papers.claims import (
    QUOTED,
    Claim,
    Fit,
    Numbers,
    Quoted,
    Verdict,
    judged,
    power_law,
)
from lipscope.papers.page import Line, Picture
from lipscope.papers.setting import Setting

RELEASED = "as released"
MEANT = "as meant"
TRAIN = "as released, train mode"
"""Which map: what the scripts differentiate, what the paper describes, and that with dropout."""

ROUNDING = 0.005
"""Half a unit of the last digit of the quoted exponents."""

LENGTHS = {"alice": range(2, 100, 2), "ag_news": range(2, 503, 10)}
SHORT_LENGTHS = (4, 8, 16, 24, 32, 48)
WINDOWS = 10
FEW_WINDOWS = 3
ITEMS = 1000
"""Texts of AG_NEWS that the scripts join."""


@dataclass(frozen=True)
class Subject:
    """A model of the figures.

    causal: whether an encoder is read as a decoder
    random: whether its weights are random
    """

    name: str
    words: str
    causal: bool = False
    random: bool = False


BERT = Subject("bert-base-uncased", "BERT")
DECODER = Subject("bert-base-uncased", "BERT as a decoder", causal=True)
RANDOM = Subject("gpt2", "GPT-2 with random weights", random=True)
GPT2 = Subject("gpt2", "GPT-2")


def released_statistic(f: Callable[[Tensor], Tensor], X: Tensor, value: Tensor) -> Tensor:
    """sqrt(||J' f(X)||) of each member of a batch: what the released scripts call the constant."""
    return jacobian(f, X).rmv(value).flatten(1).norm(dim=1).sqrt()


def layer_maps(model: Model, site: Site, subject: Subject) -> dict[str, Any]:
    """The map as released and as meant, at one layer.

    BERT: the scripts call `layer.attention`, which includes the output projection, the residual
    and the LayerNorm, without a mask even for the decoder. The paper describes attention alone.
    GPT-2: they call `attn`, which is the map as meant.
    """
    f = site.f
    assert isinstance(f, SelfAttention) and site.layer is not None
    if subject.name == "gpt2":
        return {RELEASED: f}
    layers: Any = model.trunk.encoder.layer  # type: ignore[union-attr]
    norm = layers[site.layer].attention.output.LayerNorm
    bias = site.offset
    unmasked = replace(f, causal=False, mask=None)
    return {RELEASED: lambda x: norm(x + unmasked(x) + bias), MEANT: f}


def measure_figure(subject: Subject, text: str, setting: Setting) -> Numbers:
    """Both numbers of every map at both layers, for every window; one point per window."""
    return setting.shared(
        ("figure", subject, text), lambda: _measure_figure(subject, text, setting)
    )


def _measure_figure(subject: Subject, text: str, setting: Setting) -> Numbers:
    seed = setting.seed if subject.random else None
    model, _ = setting.model(subject.name, random_init=seed, causal=subject.causal)
    words, _ = setting.text(text)
    if text == "ag_news" and (items := setting.labelled(text)) is not None:
        words = " ".join(item for _, item in items[:ITEMS])
    lengths = SHORT_LENGTHS if setting.quick else LENGTHS[text]
    windows = FEW_WINDOWS if setting.quick else WINDOWS
    ids = model.encode(words, special_tokens=True)
    layers = [0, min(6, model.layers // 2)]
    points: list[dict[str, Any]] = []
    start = 0
    for n in setting.track(lengths):
        if start + windows * n > len(ids):
            start = 0  # a short text is read again; the papers' are long enough
        cut = torch.tensor(ids[start : start + windows * n]).reshape(-1, n)
        start += windows * n
        for site in model.sites(cut, scopes=["attention"], layers=layers):
            points += _points(model, site, subject, 6 if site.layer else 0, setting.seed)
    return {"points": points, "layers": layers, "windows": windows}


def _points(
    model: Model, site: Site, subject: Subject, layer: int, seed: int
) -> list[dict[str, Any]]:
    """One point per window: n, radii, and both numbers of every map."""
    X = site.X
    norms = site.X.norm(dim=-1)
    columns: dict[str, list[float]] = {
        "rms": norms.square().mean(dim=1).sqrt().tolist(),
        "largest": norms.amax(dim=1).tolist(),
    }
    for name, f in layer_maps(model, site, subject).items():
        value = site.value() if f is site.f else f(X)
        columns[f"sigma {name}"] = local_lipschitz(f, X, 1e-4).value.tolist()  # type: ignore[union-attr]
        columns[f"statistic {name}"] = released_statistic(f, X, value).tolist()
    if subject.random and site.layer is not None:
        attention = model.trunk.h[site.layer].attn  # type: ignore[union-attr,index]
        columns[f"statistic {TRAIN}"] = _with_dropout(attention, X, seed)
    return [
        {"layer": layer, "n": X.shape[1]} | {name: column[i] for name, column in columns.items()}
        for i in range(len(X))
    ]


def _with_dropout(attention: Any, X: Tensor, seed: int) -> list[float]:
    """The statistic of GPT-2's attention in train mode, where each call drops other weights."""
    n = X.shape[1]
    mask = torch.full((n, n), -math.inf, dtype=X.dtype, device=X.device).triu(1)[None, None]
    attention.train()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = []
            for x in X:
                back = torch.func.vjp(lambda y: attention(y, attention_mask=mask)[0], x[None])[1]
                with torch.no_grad():
                    other = attention(x[None], attention_mask=mask)[0]
                found.append(back(other)[0].norm().sqrt().item())
    finally:
        attention.eval()
    return found


def _series(numbers: Numbers, name: str, layer: int) -> list[tuple[float, float]]:
    """(n, value) of every window at a layer."""
    return [(p["n"], p[name]) for p in numbers["points"] if p["layer"] == layer and name in p]


def _names(numbers: Numbers) -> list[str]:
    return [name for name in numbers["points"][0] if name.startswith(("sigma", "statistic"))]


def _label(name: str) -> str:
    return name.replace("sigma", "σ").replace("statistic", "√‖Jᵀf‖")


def growth(numbers: Numbers, name: str, layer: int) -> Fit:
    """The fitted power of n."""
    return power_law(_series(numbers, name, layer))


def judge_exponent(layer: int, numbers: Numbers, quoted: Quoted) -> Verdict:
    """Whether sigma grows with the quoted exponent; if not, whether the statistic does."""
    claimed = quoted["exponent"]
    fits = {name: growth(numbers, name, layer) for name in _names(numbers)}
    sigma = fits.pop(f"sigma {RELEASED}")
    statistic = fits.pop(f"statistic {RELEASED}")
    holds = sigma.contains(claimed, ROUNDING)
    words = f"quoted n^{claimed:g}; σ grows like n^{sigma}; the released statistic √‖Jᵀf‖, "
    words += f"measured on the same inputs, like n^{statistic}"
    if not holds:
        explains = statistic.contains(claimed, ROUNDING)
        words += ", which contains the quoted exponent" if explains else ": neither contains it"
    # The other maps and modes, as far as they were measured: dropout, the mask, attention alone.
    words += "".join(f"; {_label(name)} like n^{fit}" for name, fit in fits.items())
    return judged(holds, words, sigma.interval)


def judge_plotted(layer: int, numbers: Numbers, quoted: Quoted) -> Verdict:
    """Whether what the figure plots, the statistic, is the constant."""
    ratios = sorted(
        b / a
        for (_, a), (_, b) in zip(
            _series(numbers, f"sigma {RELEASED}", layer),
            _series(numbers, f"statistic {RELEASED}", layer),
            strict=True,
        )
    )
    low = ratios[0]
    high = ratios[-1]
    sigma = growth(numbers, f"sigma {RELEASED}", layer)
    statistic = growth(numbers, f"statistic {RELEASED}", layer)
    reason = (
        f"the plotted √‖Jᵀf‖ is {low:.3g} to {high:.3g} times σ on the same inputs; "
        f"σ grows like n^{sigma}, what is plotted like n^{statistic}"
    )
    return judged(low >= 1 - SAME and high <= 1 + SAME, reason, (low, high))


SAME = 0.05
"""Relative difference up to which a plotted value counts as the constant."""


def judge_radius(layer: int, numbers: Numbers, quoted: Quoted) -> Verdict:
    """Whether sigma grows with the radius when the length is held fixed."""
    chosen = [p for p in numbers["points"] if p["layer"] == layer]
    fit = power_law(
        [(p["rms"], p[f"sigma {RELEASED}"]) for p in chosen], held=[p["n"] for p in chosen]
    )
    alone = power_law([(p["rms"], p[f"statistic {RELEASED}"]) for p in chosen])
    radii = [p["rms"] for p in chosen]
    if not math.isfinite(fit.low):
        reason = (
            f"the RMS radius is {min(radii):.4g} to {max(radii):.4g} in all {len(radii)} windows: "
            "LayerNorm sets it, and nothing can be seen to grow with it"
        )
        return judged(False, reason)
    reason = (
        f"at a fixed length, σ of {len(radii)} windows grows like R^{fit} in the RMS radius, "
        f"{min(radii):.3g} to {max(radii):.3g}; the plotted statistic, over all lengths together, "
        f"like R^{alone}"
    )
    if fit.low <= 0 <= fit.high:
        reason += "; the interval of σ contains 0, so that no growth is established"
    return judged(fit.low > 0, reason, fit.interval)


def judge_magnitude(layer: int, numbers: Numbers, quoted: Quoted) -> Verdict:
    """Whether the radius of the tokens changes with the length."""
    fit = growth(numbers, "rms", layer)
    largest = growth(numbers, "largest", layer)
    reason = f"the RMS norm of tokens changes like n^{fit}, the largest norm like n^{largest}"
    return judged(fit.low > 0 or fit.high < 0, reason, fit.interval)


def plot_length(layer: int, overlay: str, numbers: Numbers) -> Picture:
    """Medians and ranges over windows, and the curve that the paper draws."""
    lines = [_median_line(numbers, name, layer) for name in _names(numbers)]
    values = QUOTED[overlay].values
    if "exponent" in values:
        n = sorted({p["n"] for p in numbers["points"]})
        y = [values["constant"] * x ** values["exponent"] for x in n]
        name = f"drawn in the paper: {values['constant']:g} n^{values['exponent']:g}"
        lines.append(Line(name, n, y, "dashes"))
    return Picture(title=f"Layer {layer} over length", x="n, tokens", y="constant", lines=lines)


def _median_line(numbers: Numbers, name: str, layer: int) -> Line:
    series = _series(numbers, name, layer)
    lengths = sorted({n for n, _ in series})
    groups = [[value for m, value in series if m == n] for n in lengths]
    return Line(
        name=_label(name),
        x=lengths,
        y=[median(group) for group in groups],
        spread=([min(group) for group in groups], [max(group) for group in groups]),
    )


def plot_radius(layer: int, numbers: Numbers) -> Picture:
    """Every window by its radius, one series per third of the lengths."""
    chosen = [p for p in numbers["points"] if p["layer"] == layer]
    lengths = sorted({p["n"] for p in chosen})
    cuts = [lengths[0], lengths[len(lengths) // 3], lengths[2 * len(lengths) // 3], math.inf]
    lines = []
    for kind, label in (("sigma", "σ"), ("statistic", "√‖Jᵀf‖")):
        for low, high in pairwise(cuts):
            part = [p for p in chosen if low <= p["n"] < high]
            part = part[:: max(1, len(part) // 60)]  # a page of 28 figures must stay small
            top = max(p["n"] for p in part)
            lines.append(
                Line(
                    f"{label}, n = {low:g} to {top}",
                    [p["rms"] for p in part],
                    [p[f"{kind} {RELEASED}"] for p in part],
                    "cloud",
                )
            )
    return Picture(
        title=f"Layer {layer} over radius", x="RMS norm of tokens", y="constant", lines=lines
    )


def plot_magnitude(layer: int, numbers: Numbers) -> Picture:
    """RMS and largest norm of tokens over length."""
    lines = [_median_line(numbers, name, layer) for name in ("rms", "largest")]
    return Picture(title=f"Tokens of layer {layer}", x="n, tokens", y="norm", lines=lines)


def _figure(id: str, subject: Subject, text: str, layer: int, axis: str) -> Claim:
    """The claim of one figure."""
    book = {"alice": "Alice", "ag_news": "AG_NEWS"}[text]
    needs = [] if subject.random else [subject.name]
    needs += [f"{book} text"] + (["tokenizer of gpt2"] if subject.random else [])
    plot: Callable[[Numbers], Picture] = partial(plot_length, layer, id)
    if axis == "radius":
        says = "σ grows with the radius of the tokens"
        judge = judge_radius
        plot = partial(plot_radius, layer)
    elif axis == "magnitude":
        says = "the size of tokens depends on their number"
        judge = judge_magnitude
        plot = partial(plot_magnitude, layer)
    elif "exponent" in QUOTED[id].values:
        says = f"σ grows like n^{QUOTED[id]['exponent']:g}"
        judge = judge_exponent
    else:
        says = "the figure shows σ over n"
        judge = judge_plotted
    return Claim(
        id,
        partial(measure_figure, subject, text),
        partial(judge, layer),
        plot,
        needs=", ".join(needs),
        says=f"{subject.words}, layer {layer}, {book}: {says}",
    )


CLAIMS = [
    *(
        _figure(f"C{first + i}", subject, text, layer, axis)
        for first, subject in ((1, BERT), (9, DECODER), (17, RANDOM))
        for i, (text, axis, layer) in enumerate(
            (text, axis, layer)
            for text in ("alice", "ag_news")
            for axis in ("length", "radius")
            for layer in (0, 6)
        )
    ),
    _figure("C25", GPT2, "alice", 0, "length"),
    _figure("C26", GPT2, "alice", 6, "length"),
    _figure("C27", GPT2, "alice", 0, "radius"),
    _figure("C28", GPT2, "alice", 6, "radius"),
    _figure("C29", GPT2, "alice", 6, "magnitude"),
]
