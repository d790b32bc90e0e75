"""The one writer: every outcome of an engine is on disk before the next is asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from lipscope.study.records import Job, Outcome
from lipscope.study.store import Store

Progress = Callable[[float, float], None]
"""Called with the work done and the whole of it, in the same unit, at the start and after every job."""


def keep(
    outcomes: Generator[Outcome],
    store: Store,
    jobs: Sequence[Job],
    progress: Progress | None = None,
) -> None:
    """Takes every outcome to the store; Ctrl-C leaves a note that says how to go on."""
    total, done, kept = sum(job.weight for job in jobs), 0.0, 0
    report = progress or (lambda done, total: None)
    report(done, total)
    identity, device = store.info().identity, store.info().about.device
    try:
        with closing(outcomes):
            for job, rows, sensitivities, failure in outcomes:
                if failure is not None:
                    rows = job.failed_rows(failure, identity.dtype, device)
                store.write(rows, sensitivities)
                done, kept = done + job.weight, kept + 1
                report(done, total)
    except KeyboardInterrupt as stop:
        stop.add_note(_farewell(store, kept, len(jobs)))
        raise


def _farewell(store: Store, kept: int, jobs: int) -> str:
    if store.directory is None:
        return "Stopped; nothing was kept, because no --out directory was given."
    return f"Stopped; {kept} of {jobs} jobs are kept in {store.directory}. The same command goes on from there."
