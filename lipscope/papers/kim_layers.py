"""Claims K3 and K6: attention at inputs where the Jacobian of dot product is large.

The inputs are those of the proof that it has no constant: a token at 0, whose query attends to all
others alike, among tokens that are far from each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipscope.linalg.local import local_lipschitz
from lipscope.nn.attention_layer import AttentionLayer, DotSelfAttention
from lipscope.nn.contractive import ContractiveL2Attention
from lipscope.papers.charlm.language_model import VARIANTS
from lipscope.papers.claims import Claim, Numbers, Quoted, Verdict, judged
from lipscope.papers.page import Line, Picture, columns
from lipscope.papers.setting import Setting, penn_treebank
from lipscope.papers.trainings import Plan, Stack

DIM = 32
HEADS = 4
TOKENS = 64
CONSTANTS = (0.5, 0.7, 0.9)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Standard deviations of the tokens."""

CONVERGED = 1e-10
LOST = 1e-2
"""Relative errors below and above which an inverse was found or not."""


def blow_up_inputs(count: int, n: int, dim: int, size: float, seed: int) -> Tensor:
    """Sequences [count, n, dim]: Gaussian tokens of this standard deviation, the first one at 0."""
    g = torch.Generator().manual_seed(seed)
    X = size * torch.randn(count, n, dim, generator=g, dtype=torch.float64)
    X[:, 0] = 0
    return X


@torch.no_grad()
def inverse_error(g: Callable[[Tensor], Tensor], X: Tensor, steps: int) -> float:
    """The largest relative error after steps x <- y - g(x) from x = y, where y = X + g(X)."""
    y = X + g(X)
    x = y.clone()
    for _ in range(steps):
        x = y - g(x)
    return float(((x - X).flatten(1).norm(dim=1) / X.flatten(1).norm(dim=1)).max())


def run_inversion(setting: Setting) -> Numbers:
    """Errors of the inverse of x + g(x), for dot product and for contractive L2 attention.

    Dot product is scaled to the same constant at Gaussian tokens of standard deviation 1.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        dot = DotSelfAttention(DIM, HEADS).double().requires_grad_(False)
        calm = [
            ContractiveL2Attention(DIM, HEADS, c).double().requires_grad_(False) for c in CONSTANTS
        ]
    f = dot.as_map(TOKENS)

    def scaled(factor: float, x: Tensor) -> Tensor:
        return factor * dot(x)

    sizes = SIZES[::2] if setting.quick else SIZES
    count, steps = (1, 50) if setting.quick else (8, 200)
    g = torch.Generator().manual_seed(setting.seed)
    ordinary = torch.randn(count, TOKENS, DIM, generator=g, dtype=torch.float64)
    unit = largest_sigma(f, ordinary)
    rows: list[dict[str, float]] = []
    for c, layer in zip(CONSTANTS, calm, strict=True):
        for size in sizes:
            setting.progress(len(rows), len(CONSTANTS) * len(sizes))
            X = blow_up_inputs(count, TOKENS, DIM, size, setting.seed)
            rows.append(
                {
                    "constant": c,
                    "size": size,
                    "dot sigma": c / unit * largest_sigma(f, X),
                    "dot": inverse_error(partial(scaled, c / unit), X, steps),
                    "contractive sigma": largest_sigma(layer.as_map(TOKENS), X),
                    "contractive": inverse_error(layer, X, steps),
                }
            )
    return {"rows": rows}


def largest_sigma(f: Callable[[Tensor], Tensor], X: Tensor) -> float:
    """The largest local constant over a batch of inputs."""
    return float(torch.as_tensor(local_lipschitz(f, X, 1e-3).value).max())


def judge_inversion(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    calm = max(row["contractive"] for row in rows)
    smooth = [row["dot"] for row in rows if row["dot sigma"] < 1]
    lost = [row for row in rows if not row["dot"] <= LOST]
    largest = max(row["size"] for row in rows)
    everywhere = {row["constant"] for row in lost if row["size"] == largest}
    holds = (
        calm <= CONVERGED
        and everywhere == {row["constant"] for row in rows}
        and max(smooth, default=0.0) <= CONVERGED
        and all(row["dot sigma"] > 1 for row in lost)
    )
    steepest = min((row["dot sigma"] for row in lost), default=math.nan)
    reason = (
        f"the largest relative error of the inverse of contractive L2 attention is {calm:.1e} "
        f"(local constants up to {max(row['contractive sigma'] for row in rows):.2g}); dot "
        f"product, scaled to the same constant at ordinary tokens, fails from a local constant of "
        f"{steepest:.2g} on (error {max(row['dot'] for row in rows):.2g}); where that is below 1, "
        f"its error is at most {max(smooth, default=math.nan):.1e}"
    )
    return judged(holds, reason)


def plot_inversion(numbers: Numbers) -> Picture:
    floor = 1e-17  # errors of 0 have no place on a logarithmic axis
    lines = []
    for kind, words in (("dot", "dot product"), ("contractive", "contractive L2")):
        for c in sorted({row["constant"] for row in numbers["rows"]}):
            rows = [row for row in numbers["rows"] if row["constant"] == c]
            errors = [max(row[kind], floor) for row in rows]
            lines.append(Line(f"{words}, {c:g}", [row["size"] for row in rows], errors))
    return Picture(
        title="Error of the inverse of x + g(x) at a token at 0 among far tokens",
        x="standard deviation of the tokens",
        y="largest relative error",
        lines=lines,
    )


PLAN = Plan(
    depths=(2,),
    rates=(3e-3,),
    variants=("dot", "L2 tied"),
    width=64,
    context=64,
    batch=16,
    steps=1000,
    seeds=1,
)
SMALL: dict[str, Any] = {"width": 32, "heads": 2, "context": 32, "batch": 8}
QUICK_PLAN = replace(PLAN, **SMALL, rates=(1e-2,), steps=60, warmup=10)


def run_output_range(setting: Setting) -> Numbers:
    """Spread of the outputs of trained attention layers at inputs of many sizes."""
    plan = QUICK_PLAN if setting.quick else PLAN
    text = penn_treebank(setting, plan.context)
    rows = []
    for name in setting.track(plan.variants):
        variant = VARIANTS[name]
        shape = plan.architecture(len(text.alphabet), variant, plan.depths[0])
        stack = Stack(shape, [setting.seed], [plan.rates[0]], "cpu", variant.model)
        stack.train(text, plan)
        loss = stack.test_losses(text, 64)[0].item()
        layers = [m for m in stack.model(0).modules() if isinstance(m, AttentionLayer)]
        rows += [
            {
                "variant": name,
                "layer": i,
                "loss": loss,
                **_spread(layer, size, plan.context, setting),
            }
            for i, layer in enumerate(layers)
            for size in SIZES[::2]
        ]
    return {"rows": rows, "unigram": text.unigram_loss}


@torch.no_grad()
def _spread(layer: AttentionLayer, size: float, n: int, setting: Setting) -> dict[str, float]:
    layer = layer.double()
    X = blow_up_inputs(4, n, layer.dim, size, setting.seed)
    Y = layer(X)
    f = layer.as_map(n)
    assert f.O is not None
    return {
        "size": size,
        # What the layer does to tokens that are all the same, whatever its scores.
        "values": float(torch.linalg.matrix_norm(f.O @ f.V, 2)),
        "range": float((Y.max() - Y.min()) / (X.max() - X.min())),
        "deviation": float(Y.std() / X.std()),
        "sigma": largest_sigma(f, X),
    }


def judge_output_range(numbers: Numbers, quoted: Quoted) -> Verdict:
    size = max(row["size"] for row in numbers["rows"])
    far = [row for row in numbers["rows"] if row["size"] == size]
    worst = {
        kind: {
            name: max(row[kind] for row in far if row["variant"] == name)
            for name in ("dot", "L2 tied")
        }
        for kind in ("range", "deviation", "sigma", "values")
    }
    learned = all(row["loss"] < numbers["unigram"] for row in far)
    holds = (
        learned
        and worst["range"]["L2 tied"] < 2
        and worst["range"]["dot"] > 2 * worst["range"]["L2 tied"]
    )
    reason = (
        f"range of the outputs over that of the inputs at standard deviation {size:g}: dot product "
        f"{worst['range']['dot']:.2f}, L2 {worst['range']['L2 tied']:.2f}; standard deviations "
        f"{worst['deviation']['dot']:.2f} and {worst['deviation']['L2 tied']:.2f}; local constants "
        f"{worst['sigma']['dot']:.3g} and {worst['sigma']['L2 tied']:.3g}. An output is a mean of "
        f"values: over all layers its range is {_ratios(far, 'values')} times ||O V||, and "
        f"{_ratios(far, 'sigma')} times the local constant"
    )
    if not learned:
        reason += "; a model has not learned the frequencies of characters"
    return judged(holds, reason)


def _ratios(rows: list[dict[str, Any]], to: str) -> str:
    """The smallest and largest range of outputs in units of another number of the layer."""
    found = [row["range"] / row[to] for row in rows]
    return f"{min(found):.2g} to {max(found):.2g}"


def plot_output_range(numbers: Numbers) -> Picture:
    lines = []
    for name in ("dot", "L2 tied"):
        for layer in sorted({row["layer"] for row in numbers["rows"]}):
            rows = [r for r in numbers["rows"] if (r["variant"], r["layer"]) == (name, layer)]
            lines += columns(rows, "size", {"range": f"{name}, layer {layer}"})
    return Picture(
        title="Range of the outputs of trained attention over the range of its inputs",
        x="standard deviation of the tokens",
        y="range of outputs / range of inputs",
        lines=lines,
    )


CLAIMS = [
    Claim("K3", run_inversion, judge_inversion, plot_inversion),
    Claim("K6", run_output_range, judge_output_range, plot_output_range, needs="Penn Treebank"),
]
