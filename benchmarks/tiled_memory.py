"""Peak memory of tiled attention at n = 16,384 on the CPU, and its products against closed forms.

Each case runs in a process of its own; its peak is counted above the memory before it.

    python benchmarks/tiled_memory.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lipscope as ls
from lipscope.attention import linearization

D = 64
Product = Callable[[Tensor], Tensor]
Case = tuple[ls.SelfAttention, Tensor, Product, Product]


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform == "linux" else peak / 2**20


def random(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def equal_tokens(n: int, g: torch.Generator) -> Case:
    """All tokens equal: P = 1/n and no covariance, so J = (1/n) 1 1' (x) V."""
    Q, K, V = (random(g, D, D) / 8 for _ in range(3))
    X = random(g, 1, D).repeat(n, 1)
    return (
        ls.SelfAttention(Q, K, V),
        X,
        lambda E: (E.mean(0, keepdim=True) @ V.T).expand(n, D),
        lambda U: (U.mean(0, keepdim=True) @ V).expand(n, D),
    )


def causal_average(n: int, g: torch.Generator) -> Case:
    """Zero scores under a causal mask: J = C (x) V, C_ij = 1/i for j <= i, Hardy's operator."""
    V, zero = random(g, D, D) / 8, torch.zeros(D, D, dtype=torch.float64)
    i = torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    return (
        ls.SelfAttention(zero, zero, V, causal=True),
        random(g, n, D),
        lambda E: (E.cumsum(0) / i) @ V.T,
        lambda U: (U / i).flip(0).cumsum(0).flip(0) @ V,
    )


CASES = {f.__name__: f for f in (equal_tokens, causal_average)}


def one(name: str, n: int) -> dict[str, float | str | int]:
    """One case in this process: a product each way, compared with the closed form."""
    if n * n * 8 <= linearization.CACHE:
        raise SystemExit(
            f"n = {n} is too small: the weights would be kept, not recomputed by tiles"
        )
    g = torch.Generator().manual_seed(0)
    f, X, product, adjoint = CASES[name](n, g)
    E, U = random(g, n, D), random(g, n, D)
    before = peak_mib()
    J = ls.jacobian(f, X)
    forward, backward = J.mv(E), J.rmv(U)
    used = peak_mib() - before
    pairs = ((forward, product(E)), (backward, adjoint(U)))
    error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return {"case": name, "n": n, "mib": used, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=16384)
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "tiled_memory_cpu.json"
    )
    args = parser.parse_args()
    if args.case:
        print(json.dumps(one(args.case, args.n)))
        return
    rows = []
    for name in CASES:
        command = [sys.executable, __file__, "--case", name, "--n", str(args.n)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            "{case}: n = {n}, {mib:.0f} MiB above the start, relative error {error:.0e}".format(
                **row
            )
        )
        rows.append(row)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"limit_mib": 1024, "d": D, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
