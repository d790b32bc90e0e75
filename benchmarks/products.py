"""Rate of products with J and J' on the CPU, against the matrix products that they consist of.

For each case, one thread: the counted flops of a product over its time, the same for plain
`torch.bmm` and `torch.mm` calls of the same shapes on contiguous operands, and for one large matrix
product. Times are CPU seconds, the shortest of several rounds in which everything takes turns.

    python -m benchmarks.products
    python -m benchmarks.products --before DIR     # also the code of another checkout, in turn
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lipscope as ls

ROUNDS, SECONDS = 3, 0.08
"""Rounds over all cases, and the time that each spends on one thing."""


class Case(NamedTuple):
    """A layer of 12 heads of size 32 on some inputs, as a whole or head by head."""

    inputs: int
    n: int
    apart: bool
    dtype: torch.dtype

    @property
    def name(self) -> str:
        what = "heads" if self.apart else "layer"
        return f"{what}, {self.inputs} x {self.n}, {str(self.dtype).removeprefix('torch.')}"


HEADS, SIZE = 12, 32
CASES = [
    *(Case(10, n, False, torch.float32) for n in (16, 100)),
    *(Case(3, n, apart, torch.float64) for apart in (False, True) for n in (32, 128, 256)),
    Case(1, 1024, False, torch.float64),
]


def operator(case: Case) -> ls.LinearOperator:
    """The Jacobian at Gaussian tokens; head by head, in the coordinates in which it is solved."""
    g, d = torch.Generator().manual_seed(0), HEADS * SIZE
    Q, K, V, O = torch.randn(4, d, d, generator=g, dtype=case.dtype) / math.sqrt(d)
    X = torch.randn(case.inputs, case.n, d, generator=g, dtype=case.dtype)
    f = ls.SelfAttention(Q, K, V, None if case.apart else O, heads=HEADS)
    J = (f.heads_apart() if case.apart else f).jacobian(X)
    return J if J.compressed is None else J.compressed.core


def shapes(case: Case) -> list[tuple[int, int, int, int]]:
    """The matrix products of J and J' together as (batch, rows, inner, columns).

    J: projections, dS = [dq, q] [k, dk]', dP v, P dv. J': g v', gT k, gT' q, P' g, projections.
    """
    n, d, pairs = case.n, HEADS * SIZE, case.inputs * HEADS
    tangent = [(pairs, n, 2 * SIZE, n)] + 2 * [(pairs, n, n, SIZE)]
    cotangent = [(pairs, n, SIZE, n)] + 3 * [(pairs, n, n, SIZE)]
    if case.apart:
        return [*tangent, *cotangent] + 2 * [(pairs, n, 3 * SIZE, 3 * SIZE)]
    tokens = case.inputs * n
    around = [(1, tokens, d, 3 * d), (1, tokens, d, d), (1, tokens, d, d), (1, tokens, 3 * d, d)]
    return [*tangent, *cotangent, *around]


def flops(products: list[tuple[int, int, int, int]]) -> int:
    return sum(2 * math.prod(shape) for shape in products)


def plain(products: list[tuple[int, int, int, int]], dtype: torch.dtype) -> Callable[[], None]:
    """The matrix products alone, each into a place of its own."""
    triples = [
        (torch.randn(b, m, k, dtype=dtype), torch.randn(b, k, n, dtype=dtype), (b, m, n))
        for b, m, k, n in products
    ]
    pairs = [(x, y, torch.empty(out, dtype=dtype)) for x, y, out in triples]

    def run() -> None:
        for x, y, out in pairs:
            if len(x) == 1:
                torch.mm(x[0], y[0], out=out[0])
            else:
                torch.bmm(x, y, out=out)

    return run


def shortest(call: Callable[[], object]) -> float:
    """CPU seconds of one call: the shortest of as many as fit."""
    best, spent = math.inf, 0.0
    while spent < SECONDS:
        began = time.process_time()
        call()
        spent += (took := time.process_time() - began)
        best = min(best, took)
    return best


def measure() -> dict[str, dict[str, float]]:
    """GFLOP/s of J, of J' and of plain products in every case, and of one large product."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for case in CASES:
            J, products = operator(case), shapes(case)
            E, U = (
                torch.randn(J.leading + shape, dtype=case.dtype)
                for shape in (J.in_shape, J.out_shape)
            )
            alone = plain(products, case.dtype)
            large = plain([(1, 1024, 1024, 1024)], case.dtype)

            def forward(J: ls.LinearOperator = J, E: Tensor = E) -> Tensor:
                return J.mv(E)

            def backward(J: ls.LinearOperator = J, U: Tensor = U) -> Tensor:
                return J.rmv(U)

            work = flops(products) / 1e9
            found[case.name] = {
                "J": work / 2 / shortest(forward),  # J and J' have the same number of flops
                "J'": work / 2 / shortest(backward),
                "plain": work / shortest(alone),
                "large": 2 * 1.024**3 / shortest(large),
            }
    return found


def in_turn(folders: list[Path]) -> list[dict[str, dict[str, float]]]:
    """`measure` with the package of each folder, round after round; the best of each rate."""
    best: list[dict[str, dict[str, float]]] = [{} for _ in folders]
    for _ in range(ROUNDS):
        for so_far, folder in zip(best, folders, strict=True):
            command = [sys.executable, str(Path(__file__).resolve()), "--once"]
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            for name, rates in json.loads(done.stdout).items():
                kept = so_far.setdefault(name, rates)
                so_far[name] = {what: max(kept[what], rate) for what, rate in rates.items()}
    return best


def pair(rates: dict[str, float]) -> float:
    """The rate of J and J' together."""
    return 2 / (1 / rates["J"] + 1 / rates["J'"])


def table(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    head = ["case", "J", "J'", "same shapes", "large", "J and J' / same shapes"]
    lines = ["| " + " | ".join([*head, *(["before"] if before else [])]) + " |"]
    lines.append("|---" * (len(head) + bool(before)) + "|")
    for name, r in now.items():
        cells = [name, *(f"{r[what]:.1f}" for what in ("J", "J'", "plain", "large"))]
        # The plain products of all runs are the same: the best of them is the rate to reach.
        most = max(r["plain"], before[name]["plain"]) if before else r["plain"]
        cells.append(f"{pair(r) / most:.2f}")
        cells += [f"{pair(before[name]) / most:.2f}"] if before else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure()))
        return
    folders = [Path(__file__).resolve().parents[1], *filter(None, [options.before])]
    best = in_turn(folders)
    print("GFLOP/s, one thread\n\n" + table(best[0], best[1] if options.before else None))


if __name__ == "__main__":
    main()
