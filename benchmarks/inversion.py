"""Inverting x + g(x): contractive L2 attention at every scale; dot product fails at large ones.

python benchmarks/inversion.py [PNG]                # for instance docs/gallery/inversion.png
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import lipscope as ls
from lipscope.nn.invertible import theory_steps
from lipscope.papers.kim_layers import inverse_error

DIM, HEADS, TOKENS = 32, 4, 64
CONSTANTS = (0.5, 0.7, 0.9)
BALLS = (None, 1.0, 0.25)
SCALES = (0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)


def tokens(scale: float) -> Tensor:
    return scale * torch.randn(8, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


def contractive(constant: float, ball: float | None = None) -> ls.nn.InvertibleResidual:
    torch.manual_seed(0)
    return ls.nn.InvertibleResidual(ls.nn.ContractiveL2Attention(DIM, HEADS, constant, ball=ball))


def inverse_rows(ball: float | None) -> list[tuple[float, float, float, float, int, int]]:
    """(constant, scale, largest error, largest error bound, steps, theoretical steps), float32."""
    found = []
    for constant in CONSTANTS:
        r = contractive(constant, ball)
        for scale in (1.0, 10.0):
            X = tokens(scale)
            y = r(X).detach()
            back = r.inverse(y)
            first = r.g(y).detach().flatten(1).norm(dim=1)
            theory = theory_steps(
                constant, first, torch.finfo(y.dtype).eps * (y.flatten(1).norm(dim=1) + first)
            )
            error = (back.value - X).abs().max().item()
            bound = back.error_bound.max().item()
            found.append((constant, scale, error, bound, int(back.steps.max()), int(theory.max())))
    return found


def scale_rows() -> list[tuple[float, float, float, float]]:
    """(scale, sigma of dot product, its error, error of the contractive layer) after 400 steps."""
    torch.manual_seed(0)
    dot = ls.nn.DotSelfAttention(DIM, HEADS).double()
    calm = contractive(0.9).g.double()
    found = []
    for scale in SCALES:
        sigma = ls.local_lipschitz(dot.as_map(TOKENS), tokens(scale)[0].double(), 1e-4).value
        errors = [inverse_error(g, tokens(scale).double(), 400) for g in (dot, calm)]
        found.append((scale, sigma, *errors))
    return found


@torch.no_grad()
def courses() -> list[tuple[float, float | None, list[float]]]:
    """(constant, ball, relative error after each step), float32, tokens of scale 1."""
    found = []
    for constant, ball in (*((c, None) for c in CONSTANTS), *((0.9, ball) for ball in BALLS[1:])):
        r, X = contractive(constant, ball), tokens(1.0)
        y = r(X)
        x, errors = y.clone(), []
        for _ in range(12):
            errors.append(((x - X).norm() / X.norm()).item())
            x = y - r.g(x)
        found.append((constant, ball, errors))
    return found


def draw(scales: list[tuple[float, float, float, float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for constant, ball, errors in courses():
        left.semilogy(
            range(len(errors)),
            errors,
            "o-",
            markersize=3,
            label=f"constant {constant}" + (f", ball {ball:g}" if ball else ""),
        )
        left.semilogy(
            range(len(errors)),
            [errors[0] * constant**k for k in range(len(errors))],
            ":",
            color="grey",
        )
    left.plot([], [], ":", color="grey", label="guaranteed rate")
    left.set_xlabel("fixed-point steps")
    left.set_ylabel("relative error of the inverse, float32")
    left.set_ylim(1e-8, 30)
    left.legend(ncols=2, loc="upper center")
    scale, _, dot, calm = zip(*scales, strict=True)
    right.loglog(
        scale, [max(e, 1e-17) for e in dot], "o-", color="tab:red", label="dot-product attention"
    )
    right.loglog(
        scale,
        [max(e, 1e-17) for e in calm],
        "o-",
        color="tab:blue",
        label="contractive L2 attention, 0.9",
    )
    right.set_xlabel("scale of the tokens (standard deviation)")
    right.set_ylabel("relative error after 400 steps, float64")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("png", nargs="?", help="file to draw the errors to")
    png = parser.parse_args().png
    print(f"contractive L2 attention, float32, 8 x {TOKENS} tokens of size {DIM}, {HEADS} heads")
    for ball in BALLS:
        print(f"\nball: {ball or 'none'}")
        print(
            f"{'constant':>8} {'scale':>6} {'largest error':>14} {'error bound':>12} "
            f"{'steps':>6} {'theory':>7}"
        )
        for constant, scale, error, bound, steps, theory in inverse_rows(ball):
            print(f"{constant:>8} {scale:>6} {error:>14.1e} {bound:>12.1e} {steps:>6} {theory:>7}")
    print("\nx + f(x) inverted by 400 steps in float64")
    print(f"{'scale':>6} {'sigma of dot':>13} {'error, dot':>11} {'error, contractive 0.9':>23}")
    scales = scale_rows()
    for scale, sigma, dot, calm in scales:
        print(f"{scale:>6} {sigma:>13.3g} {dot:>11.1e} {calm:>23.1e}")
    if png is not None:
        draw(scales, png)


if __name__ == "__main__":
    main()
