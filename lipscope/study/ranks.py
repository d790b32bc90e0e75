"""Several processes started by torchrun measure one study: rank 0 leads and writes, others follow.

Every rank loads the model and makes the forward pass of a sample; the solves are shared, each rank
with its part of the tokens. A job begins when rank 0 sends it, so what a study holds already is
skipped by all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lipscope._types import UserError
from lipscope.attention.sharded import shard, unshard
from lipscope.linalg.differentiate import Map
from lipscope.linalg.estimate import BatchEstimate, Estimate
from lipscope.linalg.local import local_lipschitz
from lipscope.linalg.space import LostRankError, rank_lost
from lipscope.linalg.spectral import Solver
from lipscope.study.engines import Start
from lipscope.study.jobs import Job, Outcome, Work, reason

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others, for instance while they load a model."""


@dataclass(frozen=True)
class World:
    """The processes of this run.

    group:   exchanges the tensors of a solve (NCCL between GPUs, gloo otherwise)
    control: exchanges what there is to do (gloo)
    """

    rank: int
    group: Any
    control: Any


_world: ContextVar[World | None] = ContextVar("lipscope_world", default=None)


@contextmanager
def joined(device: str | None) -> Iterator[tuple[World, str]]:
    """Join the other processes; yields them, and the kind of device, on which each has its own."""
    device = torch.device(device or "cpu").type
    # On a machine with fewer GPUs than processes, several share one, which NCCL refuses.
    local = int(os.environ["LOCAL_RANK"])
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    apart = device == "cuda" and torch.cuda.device_count() >= here
    if device == "cuda":
        torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group("nccl" if apart else "gloo", timeout=PATIENCE)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    world = World(dist.get_rank(), dist.group.WORLD, control)
    token = _world.set(world)
    try:
        yield world, device
        if world.rank == 0:
            _send(world, None)
    except Exception:
        # Between two jobs, while the others wait. Interrupts and lost ranks may come in the middle
        # of one, when nobody listens: then the connections close with this process.
        if world.rank == 0:
            _send(world, None)
        raise
    finally:
        _world.reset(token)
    dist.destroy_process_group()


@dataclass(frozen=True)
class RankEngine:
    """Runs every job on all ranks together, each with its part of the tokens."""

    world: World

    def run(self, start: Start, jobs: Sequence[Job]) -> Generator[Outcome]:
        """One outcome per job, in order."""
        _send(self.world, start)
        work = _on_own_device(start)(torch.get_num_threads())
        for job in jobs:
            _send(self.world, job)
            yield _attempt(work, job)


def open_rank_engine() -> Callable[[], AbstractContextManager[RankEngine]] | None:
    """Opens the engine of the processes this one has joined; None if there are none."""
    world = _world.get()
    return None if world is None else lambda: nullcontext(RankEngine(world))


def follow(world: World) -> None:
    """Do what rank 0 does, until it has nothing more to do."""
    work: Work | None = None
    while (message := _received(world)) is not None:
        if isinstance(message, Job):
            assert work is not None
            _attempt(work, message)
        else:
            work = _on_own_device(message)(torch.get_num_threads())


def solve(
    f: Map, X: Tensor, tol: float, *, gap: float | None, solver: Solver
) -> Estimate | BatchEstimate:
    """`local_lipschitz` at X, which every rank has; with the others, where there are any."""
    world = _world.get()
    if world is None or X.shape[-2] < dist.get_world_size(world.group):
        return local_lipschitz(f, X, tol, gap=gap, solver=solver)
    try:
        e: Any = local_lipschitz(
            f, shard(X, world.group), tol, gap=gap, solver=solver, mesh=world.group
        )
    except UserError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            # The others wait for this rank, which has nothing to send them.
            raise LostRankError(f"rank {world.rank}: {error}") from error
        raise
    return replace(e, right=unshard(e.right, world.group), left=unshard(e.left, world.group))


def _attempt(work: Work, job: Job) -> Outcome:
    """The outcome of a job, the same on all ranks."""
    try:
        return work(job)
    except UserError as error:  # found by all ranks alike, before they exchange anything
        return Outcome(job, failure=reason(error))
    except Exception as error:
        # This rank's alone, for all it knows, and the others wait for it.
        raise LostRankError(f"rank {dist.get_rank()} failed: {reason(error)}") from error


def _on_own_device(start: Any) -> Start:
    """The same work on the device of this rank: rank 0 sends the name of its own."""
    card, *rest = start.args
    return partial(start.func, replace(card, device=torch.device(card.device).type), *rest)


def _send(world: World, message: Any) -> None:
    with rank_lost():
        dist.broadcast_object_list([message], src=0, group=world.control)


def _received(world: World) -> Any:
    box = [None]
    with rank_lost():
        dist.broadcast_object_list(box, src=0, group=world.control)
    return box[0]
