"""Does memory grow from call to call? Public calls repeated, with what Python and the system hold.

    python -m tests.campaigns.memory --out memory.jsonl

A leaked object raises the number of memory blocks that Python's allocator has given out for ever:
a fault is that it grew by five or more per call in the second half of the calls. Resident memory is
that after free pages went back to the system; if it grows and levels off, that is fragmentation.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import lipscope as ls
from tests.campaigns.runner import Result, campaign
from tests.study.tiny import PROSE, save_tiny

PAGE = 4096
CALLS = 100
PER_CALL = 5
KINDS = (
    "local_lipschitz",
    "local_lipschitz of a function",
    "bounds on a ball",
    "bounds around an input",
    "measure",
    "audit_model (lipscope bounds)",
)


def call_of(kind: str, place: Path) -> Callable[[], object]:
    """A call of a kind, on inputs of its own."""
    torch.manual_seed(0)
    f = ls.SelfAttention(*torch.randn(3, 16, 8, dtype=torch.float64), heads=2)
    X = torch.randn(12, 8, dtype=torch.float64)
    save_tiny(place / "tiny", layers=2)
    model = ls.load(str(place / "tiny"))
    climb = ls.attack.Climb(steps=1, restarts=1)
    calls = (
        lambda: ls.local_lipschitz(f, X),
        lambda: ls.local_lipschitz(lambda Z: f(Z), X),
        lambda: ls.bounds(f, ls.Ball(2.0, 12)),
        lambda: ls.bounds(f, ls.Around(X, 0.1)),
        lambda: ls.measure(model, PROSE, lengths=[6, 9], samples=1),
        lambda: ls.audit_model(model, PROSE, lengths=[4], layers=[0], radius=3.0, climb=climb),
    )
    return calls[KINDS.index(kind)]


def growth(call: Callable[[], object], count: int) -> tuple[int, float]:
    """Blocks and MiB by which Python and the process grow over the second half of the calls."""
    found = []
    for part in (3, count // 2, count - count // 2):  # imports and caches; two halves
        for _ in range(part):
            call()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found.append((sys.getallocatedblocks(), pages * PAGE / 2**20))
    return found[2][0] - found[1][0], found[2][1] - found[1][1]


def chunk(number: int) -> Result:
    result, kind = Result(), KINDS[number]
    with tempfile.TemporaryDirectory() as scratch:
        blocks, size = growth(call_of(kind, Path(scratch)), CALLS)
    result.count(kind, "calls", CALLS)
    result.worst[kind] = float(blocks)
    if blocks >= PER_CALL * CALLS // 2:
        result.faults.append(f"{kind}: {blocks} blocks and {size:.1f} MiB more after {CALLS} calls")
    return result


if __name__ == "__main__":
    sys.exit(campaign(chunk, 1, len(KINDS), __doc__ or ""))
