"""The single writer: every outcome of an engine is on disk before the next one is requested."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from lipscope.study.records import Job, Outcome
from lipscope.study.store import Store

Progress = Callable[[float, float], None]
"""Called with the work done and the total work, at the start and after every job."""


def keep(
    outcomes: Generator[Outcome],
    store: Store,
    jobs: Sequence[Job],
    progress: Progress | None = None,
) -> None:
    """Store every outcome; after Ctrl-C, the exception carries a note on how to resume."""
    total, done, kept = sum(job.weight for job in jobs), 0.0, 0
    report = progress or (lambda done, total: None)
    report(done, total)
    identity, device = store.info().identity, store.info().about.device
    try:
        with closing(outcomes):  # on any error the engine ends its workers now, not at exit
            for job, rows, sensitivities, failure in outcomes:
                if failure is not None:
                    rows = job.failed_rows(failure, identity.dtype, device)
                store.write(rows, sensitivities)
                done, kept = done + job.weight, kept + 1
                report(done, total)
    except KeyboardInterrupt as stop:
        stop.add_note(_note_on_resuming(store, kept, len(jobs)))
        raise


def _note_on_resuming(store: Store, kept: int, jobs: int) -> str:
    if store.directory is None:
        return "Stopped; nothing was saved, because no --out directory was given."
    return (
        f"Stopped; {kept} of {jobs} jobs are saved in {store.directory}. "
        "Run the same command again to resume."
    )
