"""One solve over several ranks: overhead of one, two sharing a GPU, and the balance of eight.

    python -m benchmarks.ranks                                    # on a GPU, 131,072 tokens
    python -m benchmarks.ranks --device cpu --tokens 512          # the same steps, to try it out
    python -m benchmarks.ranks --model                            # the table of docs/scaling.md

Prints JSON and writes it, section by section, to results/ranks_<device>.json:

one_rank    the solve through a process group of one (NCCL on a GPU) against the plain solve, in
            turns: seconds of both, the smallest ratio of neighbours, whether sigma is the same
two_ranks   two processes on one device exchange through gloo: sigma against the plain solve, and
            the bytes a rank sends per product, as counted and by the formula of docs/scaling.md
balance     the products of each of 8 ranks, one after the other on this device, with its own
            queries only: the slowest against an eighth of the whole product

A layer has 12 heads x 64 and Gaussian tokens; products in float32 and, for the rough steps of a
GPU, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import lipscope as ls
from lipscope.attention.linearization import linearize
from lipscope.attention.sharded import ShardedState, shard, sharded_jacobian
from lipscope.linalg.space import TokenShards

RESULTS = Path(__file__).parent / "results"
HEADS, WIDTH, RANKS = 12, 768, 8


def layer(n: int, causal: bool, device: str) -> tuple[ls.SelfAttention, Tensor]:
    """Gaussian weights and tokens, scaled as at initialisation."""
    generator = torch.Generator(device).manual_seed(n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    Q, K, V, O = (draw(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(4))
    return ls.SelfAttention(Q, K, V, O, heads=HEADS, causal=causal), draw(n, WIDTH)


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds that a call takes, its work on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def meet(rank: int, size: int, backend: str, folder: str) -> Any:
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=size
    )
    return dist.group.WORLD


def one_rank(n: int, device: str, times: int) -> dict[str, Any]:
    """The plain solve and that of a group of one, in turns."""
    f, X = layer(n, causal=True, device=device)
    solver = ls.Solver(seed=0)
    with tempfile.TemporaryDirectory() as folder:
        mesh = meet(0, 1, "nccl" if device == "cuda" else "gloo", folder)
        try:
            calls = {
                "plain": lambda: ls.local_lipschitz(f, X, tol=1e-2, solver=solver),
                "one rank": lambda: ls.local_lipschitz(f, X, tol=1e-2, solver=solver, mesh=mesh),
            }
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            values, packing = {}, {}
            for turn in range(times + 1):
                for name, call in calls.items():
                    taken, e = timed(call, device)
                    values[name] = e.value
                    if turn:  # the first turn compiles
                        seconds[name].append(taken)
            shards = TokenShards(n, 1, 0, mesh)
            keys = torch.randn(1, HEADS, n, 2 * WIDTH // HEADS, device=device)
            for name, exchange in (("gather", shards.gather), ("scatter", shards.scatter_sum)):
                packing[name] = min(timed(partial(exchange, keys), device)[0] for _ in range(3))
        finally:
            dist.destroy_process_group()
    ratios = [b / a for a, b in zip(seconds["plain"], seconds["one rank"], strict=True)]
    return {
        "n": n,
        "seconds": seconds,
        "ratio_median": median(ratios),
        "ratio_smallest": min(ratios),
        # A group of one exchanges nothing in a product; this is what packing would add to each.
        "packing_seconds": packing,
        "sigma": values,
        "bitwise": values["plain"] == values["one rank"],
    }


def _share(rank: int, n: int, device: str, folder: str) -> None:
    mesh = meet(rank, 2, "gloo", folder)
    f, X = layer(n, causal=True, device=device)
    mine = shard(X, mesh)
    ls.local_lipschitz(f, mine, tol=1e-2, solver=ls.Solver(seed=0), mesh=mesh)
    seconds, e = timed(
        lambda: ls.local_lipschitz(f, mine, tol=1e-2, solver=ls.Solver(seed=0), mesh=mesh), device
    )
    J = sharded_jacobian(f, mine, mesh)
    assert isinstance(J.space, TokenShards)
    before = dict(J.space.sent)
    J.mv(mine)
    sent = J.space.sent["gather"] - before["gather"]
    torch.save((e.value, seconds, sent), f"{folder}/{rank}")
    dist.destroy_process_group()


def two_ranks(n: int, device: str) -> dict[str, Any]:
    """Two processes on one device, which exchange through the host."""
    f, X = layer(n, causal=True, device=device)
    plain = ls.local_lipschitz(f, X, tol=1e-2, solver=ls.Solver(seed=0)).value
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_share, (n, device, folder), nprocs=2)  # type: ignore[attr-defined]  # torch does not export it
        (value, seconds, sent), (other, _, _) = (torch.load(f"{folder}/{r}") for r in (0, 1))
    by_formula = 2 * -(-n // 4) * 2 * WIDTH * X.element_size()  # (R - 1) 2 ceil(n / 2R) G (k + m)
    return {
        "n": n,
        "sigma": {"plain": plain, "two ranks": value},
        "relative_difference": abs(value / plain - 1),
        "ranks_agree": value == other,
        "seconds": seconds,
        "bytes_per_product": {"counted": sent, "formula": by_formula},
    }


class Imagined(TokenShards):
    """One rank of several that are not there: what they would send is made of its own tokens."""

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * (self.size + 1), dim=-2)[..., : self.n, :].contiguous()

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self.shard(x, -2)

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        return x


def products(J: ls.LinearOperator, device: str, times: int) -> dict[str, float]:
    """Median seconds of J and J', in float32 and, where there are rough steps, in bfloat16."""
    found = {}
    E = torch.randn(J.in_shape, device=device)
    U = torch.randn(J.out_shape, device=device)
    for name, op in (("float32", J), ("bfloat16", J.low_precision)):
        if op is not None:
            for side, product, x in (("J", op.mv, E), ("J'", op.rmv, U)):
                taken = [timed(partial(product, x), device)[0] for _ in range(times + 1)]
                found[f"{name} {side}"] = median(taken[1:])
    return found


def balance(n: int, causal: bool, device: str, times: int) -> dict[str, Any]:
    """Each rank's products against those of the whole."""
    f, X = layer(n, causal, device)
    whole = products(ls.jacobian(f, X), device, times)
    ranks = []
    for rank in range(RANKS):
        shards = Imagined(n, RANKS, rank)
        J = linearize(f, shards.shard(X, -2), apart=False, kind=ShardedState, space=shards)
        ranks.append(products(J, device, times))
        del J
    return {
        "n": n,
        "causal": causal,
        "whole_seconds": whole,
        "rank_seconds": ranks,
        "slowest_over_mean": {
            name: max(r[name] for r in ranks) * RANKS / sum(r[name] for r in ranks)
            for name in whole
        },
        "slowest_over_an_eighth_of_the_whole": {
            name: RANKS * max(r[name] for r in ranks) / whole[name] for name in whole
        },
    }


def agreement(n: int, device: str) -> dict[str, float]:
    """Products in bfloat16 against float32 on an imagined rank: the same map, to bfloat16."""
    f, X = layer(n, causal=True, device=device)
    shards = Imagined(n, RANKS, 2)
    J = linearize(f, shards.shard(X, -2), apart=False, kind=ShardedState, space=shards)
    found = {}
    if (low := J.low_precision) is not None:
        E, U = torch.randn(J.in_shape, device=device), torch.randn(J.out_shape, device=device)
        for name, exact, rough, x in (
            ("J", J.mv, low.mv, E),
            ("J'", J.rmv, low.rmv, U),
        ):
            y = exact(x)
            found[name] = float((rough(x) - y).norm() / y.norm())
    return found


MILLION = 2**20
STORED = RESULTS / "ranks_h200.json"

ROUGH_STEPS = 15
"""Steps in bfloat16 of a long solve, each a product with J and one with J'; one step in float32
follows. Solves of a million tokens on one H200 took 12 and 16 steps in all, by their random starts
(`benchmarks.gpu --million`).
"""

LINKS = {8: 300e9, 16: 40e9, 64: 40e9}
"""Assumed bytes per second that a rank sends: NVLink inside a machine of 8, 400 Gb/s between."""


def modelled(millions: int, ranks: int, width: int) -> dict[str, float]:
    """Seconds, traffic and memory of a solve, by the formulas of docs/scaling.md.

    width: G (k + m), the numbers of all keys and values of a token
    """
    (measured,) = (b for b in json.loads(STORED.read_text())["balance"] if b["causal"])
    whole, uneven = measured["whole_seconds"], measured["slowest_over_an_eighth_of_the_whole"]
    once = ROUGH_STEPS * (whole["bfloat16 J"] + whole["bfloat16 J'"])
    once += whole["float32 J"] + whole["float32 J'"]
    n = millions * MILLION
    sent = (ranks - 1) * 2 * -(-n // (2 * ranks)) * width  # numbers per product
    # Keys and values at X are gathered once, in float32.
    traffic = sent * (2 * 2 * ROUGH_STEPS + 4 * 2 + 4)
    # Of keys: k, v (4 bytes), their bfloat16 copies (2), dk, dv (4) and what they were received
    # in (4), all four as pairs of fp16 (8). Of own tokens: X, q (twice), o, dq, do and pairs (30),
    # and 33 Krylov vectors in float32.
    held = 22 * n * width + -(-n // ranks) * WIDTH * (30 + 4 * 33)
    return {
        "products_s": max(uneven.values()) * once * (n / measured["n"]) ** 2 / ranks,
        "traffic_s": traffic / LINKS[ranks],
        "GB_per_float32_product": 4 * sent / 1e9,
        "GB_per_rank": held / 1e9,
    }


def show_model() -> None:
    print("| tokens | G (k + m) | GPUs | products, s | traffic, s | GB per product | GB per GPU |")
    print("|---|---|---|---|---|---|---|")
    for millions in (1, 4, 16):
        for width in (1536, 256):
            for ranks in LINKS:
                m = modelled(millions, ranks, width)
                cells = [f"{millions}M", width, ranks, f"{m['products_s']:.0f}"]
                cells += [f"{m['traffic_s']:.1f}", f"{m['GB_per_float32_product']:.1f}"]
                print("|", " | ".join(map(str, [*cells, f"{m['GB_per_rank']:.0f}"])), "|")


def attempted(call: Callable[[], Any]) -> Any:
    """What a section found, or why it found nothing: the others still count."""
    try:
        return call()
    except Exception:
        return {"failed": traceback.format_exc().splitlines()[-8:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--times", type=int, default=3, help="Repetitions of what is timed.")
    parser.add_argument("--model", action="store_true", help="Print the model for more GPUs.")
    options = parser.parse_args()
    if options.model:
        show_model()
        return
    n, device, times = options.tokens, options.device, options.times
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    sections: dict[str, Callable[[], Any]] = {
        "one_rank": lambda: one_rank(n, device, times),
        "two_ranks": lambda: two_ranks(n // 4, device),
        "rough_against_float32": lambda: agreement(n // 8, device),
        "balance": lambda: [balance(n, causal, device, times) for causal in (True, False)],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"ranks_{name.split()[-1].lower()}.json"
    for section, call in sections.items():
        found[section] = attempted(call)
        print(section, json.dumps(found[section], indent=1), flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
