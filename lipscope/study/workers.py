"""Long-lived worker processes that run jobs, and may die while they do."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from lipscope._types import UserError
from lipscope.study.jobs import Group, Job, Outcome, Work, attempt, reason

TRIES = 3
HEARTBEAT = 1.0
"""Seconds between checks of the workers: a death closes the pipe, unless a child process of the
worker still holds it open."""


@dataclass(frozen=True)
class Workers:
    """Runs jobs in `count` processes; `start`, called once in each of them, returns its work.

    A worker that dies is replaced, and its current job is tried again, up to three times in all: a
    job that exhausts memory kills every worker it is given to, and must not take the study with it.
    """

    start: Callable[[], Work]
    count: int

    def run(self, jobs: Sequence[Job]) -> Generator[Outcome]:
        queue, deaths, failed_starts = _Queue(jobs), Counter[Job](), 0
        workers = [_Worker(self.start) for _ in range(min(self.count, len(jobs)))]
        try:
            while queue or any(worker.job for worker in workers):
                for worker in workers:
                    if worker.idle and queue:
                        worker.give(queue.next_for(worker, workers))
                wait([worker.pipe for worker in workers], timeout=HEARTBEAT)
                for i, worker in enumerate(workers):
                    message = worker.receive()
                    if isinstance(message, Outcome):
                        yield message
                    elif isinstance(message, _Ready):
                        failed_starts = 0
                    elif isinstance(message, _Death):
                        workers[i] = _Worker(self.start)
                        if worker.job is None:
                            failed_starts += 1
                            _check_starts(failed_starts, message)
                            continue
                        # The job may have killed its worker, or merely been there: try it again.
                        deaths[worker.job] += 1
                        if deaths[worker.job] < TRIES:
                            queue.put_back(worker.job)
                        else:
                            yield Outcome(
                                worker.job,
                                failure=f"{message.how} while running this job, {TRIES} times",
                            )
        finally:
            for worker in workers:
                worker.end()


class _Ready(NamedTuple):
    """A worker can take jobs."""


class _Refusal(NamedTuple):
    """A worker cannot be set up, for a reason the user can fix."""

    why: str


class _Death(NamedTuple):
    """A worker has died."""

    how: str


class _Worker:
    """A worker process, seen from this side of its pipe."""

    def __init__(self, start: Callable[[], Work]) -> None:
        # Not fork: it would copy torch's thread pools and CUDA contexts in an unusable state.
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end, start), daemon=True)
        self.process.start()
        far_end.close()  # so that the pipe closes when the worker dies
        self.idle = False
        self.job: Job | None = None
        self.last: Group | None = None

    def give(self, job: Job) -> None:
        self.idle, self.job, self.last = False, job, job.group
        with suppress(OSError):  # it died while idle; receive() will report it
            self.pipe.send(job)

    def receive(self) -> Outcome | _Ready | _Death | None:
        """The next message from the worker, if any."""
        # Checked before the pipe: the last message of a worker that has died is still in there.
        alive = self.process.is_alive()
        try:
            if not self.pipe.poll():
                return None if alive else self._death()
            message = self.pipe.recv()
        except (EOFError, OSError):
            return self._death()
        if isinstance(message, _Refusal):
            raise UserError(message.why)
        self.idle, self.job = True, None
        return message

    def _death(self) -> _Death:
        self.process.join()
        code = self.process.exitcode or 0
        self.pipe.close()
        return _Death(
            f"the worker was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"the worker ended ({code})"
        )

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Queue:
    """Waiting jobs, grouped by samples, so that a worker keeps the input it has prepared."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._groups: dict[Group, deque[Job]] = {}
        for job in jobs:
            self._groups.setdefault(job.group, deque()).append(job)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def put_back(self, job: Job) -> None:
        self._groups.setdefault(job.group, deque()).appendleft(job)

    def next_for(self, worker: _Worker, workers: Iterable[_Worker]) -> Job:
        """A job on the worker's own input, else on one no other worker has prepared, else any."""
        elsewhere = {other.last for other in workers if other is not worker}
        own = worker.last if worker.last in self._groups else None
        fresh = next((group for group in self._groups if group not in elsewhere), None)
        group = own or fresh or next(iter(self._groups))
        job = self._groups[group].popleft()
        if not self._groups[group]:
            del self._groups[group]
        return job


def _serve(pipe: Connection, start: Callable[[], Work]) -> None:
    """The main loop of a worker: set up once, then run jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns the store
    try:
        work = start()
    except Exception as error:
        pipe.send(_Refusal(reason(error)))
        return
    try:
        pipe.send(_Ready())
        while True:
            pipe.send(attempt(work, pipe.recv()))
    except (EOFError, OSError):
        return


def _check_starts(failed_starts: int, death: _Death) -> None:
    if failed_starts >= TRIES:
        raise UserError(
            f"worker processes do not start: {death.how}, {failed_starts} times; in a script, "
            "call measure under `if __name__ == '__main__':`, or use workers=1"
        )
