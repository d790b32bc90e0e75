"""What tests/attention/test_sharded.py looks at: four processes, in groups of 1, 2, 3 and 4.

    python -m tests.attention.four_ranks FILE     # every rank adds its number to the name

Processes are forked after the imports, which take longer than everything else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import lipscope as ls
from lipscope.attention import linearization
from lipscope.attention.sharded import shard, sharded_jacobian, unshard
from lipscope.fused import tiled
from lipscope.linalg.space import LostRankError
from tests.cases import KINDS, problem

SIZES = (1, 2, 3, 4)
SOLVER = ls.Solver(seed=5)
SHORT = timedelta(seconds=4)


def long_enough(kind: str, n: int = 4) -> tuple[ls.SelfAttention, Tensor]:
    """The first problem of a kind with a token for every rank."""
    return next(p for p in (problem(kind, seed) for seed in range(100)) if p[1].shape[0] >= n)


def layer(n: int, **options: Any) -> tuple[ls.SelfAttention, Tensor]:
    """A layer of four heads, two of them of keys, with n tokens."""
    g = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    options = {"heads": 4, "kv_heads": 2, "causal": True, **options}
    return ls.SelfAttention(draw(16, 6), draw(8, 6), draw(6, 6), **options), draw(n, 6)


def more() -> dict[str, tuple[Any, Tensor, dict[str, Any]]]:
    """Maps, inputs and options beyond the kinds: batches, heads, lengths, dtypes, storage."""
    f, X = layer(13)
    windowed, long = layer(37, window=9, kernel=ls.Dot(rope=ls.Rope.standard(40, 4)))
    seen = torch.rand(2, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.6
    masked = replace(f, mask=seen, causal=False)
    batch = torch.stack([X, 0.3 * X.flip(0)])
    return {
        "n = 4": (*layer(4), {}),
        "n = 13": (f, X, {"gap": 0.01}),
        "n = 37, window, rope": (windowed, long, {}),
        "batch": (f, batch, {}),
        "batch of masks": (masked, batch, {}),
        "heads apart": (f.heads_apart(), X, {"gap": 0.01}),
        "heads apart, batch of masks": (masked.heads_apart(), batch, {}),
        "float32": (f.to(torch.float32), X.float(), {}),
        "float32, long": (windowed.to(torch.float32), long.float().repeat(3, 1)[:40], {}),
        "restarts": (windowed, long, {"tol": 1e-9, "solver": replace(SOLVER, memory=30000)}),
        "host": (windowed, long, {"solver": replace(SOLVER, basis="host")}),
        "bfloat16": (windowed, long, {"solver": replace(SOLVER, basis="bfloat16")}),
    }


def solved(f: Any, X: Tensor, options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """The estimate, J E and J' U for fixed E and U, and the bytes this rank sent for each."""
    here = X if mesh is None else shard(X, mesh)
    J = ls.jacobian(f, X) if mesh is None else sharded_jacobian(f, here, mesh)
    g = torch.Generator().manual_seed(1)
    whole = [(*J.leading, *J.space.global_shape(shape)) for shape in (J.in_shape, J.out_shape)]
    E, U = (torch.randn(shape, generator=g, dtype=torch.float64).to(J.dtype) for shape in whole)
    sent = [dict(getattr(J.space, "sent", {}))]
    JE = J.mv(J.space.shard(E, -2))
    sent.append(dict(getattr(J.space, "sent", {})))
    JU = J.rmv(J.space.shard(U, -2))
    sent.append(dict(getattr(J.space, "sent", {})))
    e: Any = ls.spectral_norm(J, **{"solver": SOLVER, **options})
    names = ("value", "lower", "upper", "residual", "steps", "status", "confidence", "missed")
    gather = J.space.gather
    return {
        **{name: getattr(e, name) for name in names},
        "right": gather(e.right),
        "left": gather(e.left),
        "E": E,
        "U": U,
        "JE": gather(JE),
        "JU": gather(JU),
        "sent": sent,
    }


def refused(mesh: Any) -> dict[str, str]:
    """Return the errors of this rank, by the fault in the input of one rank."""
    f, X = layer(13)
    mine, rank = shard(X, mesh), dist.get_rank(mesh)
    bad = mine.clone()
    bad[0, 0] = torch.nan if rank == 1 else bad[0, 0]
    short = replace(f, kernel=ls.Dot(rope=ls.Rope.standard(12, 4)))
    calls = {
        "NaN on rank 1": lambda: ls.local_lipschitz(f, bad, mesh=mesh),
        "the same tokens on all": lambda: ls.local_lipschitz(f, X, mesh=mesh),
        "other counts": lambda: ls.local_lipschitz(f, X[: 2 + rank], mesh=mesh),
        "too few tokens": lambda: shard(X[:1], mesh),
        "another map": lambda: ls.local_lipschitz(torch.nn.Linear(6, 6).double(), mine, mesh=mesh),
        "another norm": lambda: ls.local_lipschitz(f, mine, mesh=mesh, norm="inf"),
        "splitting": lambda: ls.local_lipschitz(f, mine, mesh=mesh, splitting=True),
        "short tables": lambda: ls.local_lipschitz(short, mine, mesh=mesh),
        "a mask of this rank's tokens": lambda: ls.local_lipschitz(
            replace(f, mask=torch.ones(len(mine), len(mine), dtype=torch.bool)), mine, mesh=mesh
        ),
        "no mesh": lambda: ls.local_lipschitz(f, mine, mesh=7),  # type: ignore[arg-type]
        "a plane": lambda: ls.local_lipschitz(
            f, mine, mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        ),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ls.UserError as error:
            said[name] = str(error)
    return said


def lost(mesh: Any, vanishes: bool) -> str:
    """What rank 0 of a group hears when rank 1 ends, or hangs, between two products."""
    f, X = layer(13)
    J = sharded_jacobian(f, shard(X, mesh), mesh)
    E = shard(X, mesh)
    J.mv(E)
    if dist.get_rank(mesh) == 1:
        if vanishes:
            os._exit(0)
        time.sleep(2 * SHORT.total_seconds())
        os._exit(0)
    began = time.monotonic()
    try:
        for _ in range(3):
            J.mv(E)
    except LostRankError as error:
        return f"{time.monotonic() - began:.1f} s: {error}"
    return "nothing"


def run(rank: int, rendezvous: str, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    pairs = [dist.new_group(pair, timeout=SHORT) for pair in ([0, 1], [2, 3])]
    found: dict[str, Any] = {"solves": {}, "called": {}}
    for size in (None, *SIZES):
        if rank >= (size or 1):
            continue
        mesh, solves = None if size is None else groups[size], found["solves"].setdefault(size, {})
        for kind in sorted(KINDS.keys() - {"one token"}):
            solves[kind] = solved(*long_enough(kind), {}, mesh)
        for name, case in more().items():
            solves[name] = solved(*case, mesh)
        linearization.CACHE, kept = 0, linearization.CACHE
        tiled.TILE, tile = 40, tiled.TILE
        f, X, _ = more()["n = 37, window, rope"]
        solves["tiles"] = solved(f, X, {}, mesh)
        linearization.CACHE, tiled.TILE = kept, tile
        f, X, options = more()["n = 13"]
        here = X if mesh is None else shard(X, mesh)
        e: Any = ls.local_lipschitz(f, here, mesh=mesh, solver=SOLVER, **options)
        right = e.right if mesh is None else unshard(e.right, mesh)
        found["called"][size] = e.value, right
    found["refused"] = refused(dist.group.WORLD)
    torch.save(found, f"{file}.{rank}")
    dist.barrier()
    heard = lost(pairs[rank // 2], vanishes=rank >= 2)
    torch.save({**found, "lost": heard}, f"{file}.{rank}")
    os._exit(0)  # the other half of the pair is gone: nothing to take leave of


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (f"{folder}/meet", sys.argv[1]), nprocs=4, start_method="fork")
