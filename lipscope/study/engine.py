"""What runs the jobs: this process, or long-lived worker processes that may die."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import NamedTuple, Protocol, runtime_checkable

from lipscope._types import UserError
from lipscope.study.records import Input, Job, Outcome

Work = Callable[[Job], Outcome]

TRIES = 3
HEARTBEAT = 1.0
"""Seconds between looks at the workers: a death closes the pipe, unless an orphan of the worker still holds it."""


@runtime_checkable
class Engine(Protocol):
    """Runs jobs in any order and hands back one outcome for each; it never touches the store.

    Whoever iterates is the one writer. Closing the iterator early ends the work.
    """

    def run(self, jobs: Sequence[Job]) -> Generator[Outcome]: ...


@dataclass(frozen=True)
class InProcess:
    """One job after the other, here."""

    work: Work

    def run(self, jobs: Sequence[Job]) -> Generator[Outcome]:
        for job in jobs:
            yield _attempt(self.work, job)


@dataclass(frozen=True)
class Workers:
    """`count` processes, one job in hand each; `start`, called once in each of them, gives its work.

    A worker that dies takes one try of the job in its hands with it and is replaced; a job has three tries.
    """

    start: Callable[[], Work]
    count: int

    def run(self, jobs: Sequence[Job]) -> Generator[Outcome]:
        queue, deaths, stillborn = _Queue(jobs), Counter[Job](), 0
        crew = [_Worker(self.start) for _ in range(min(self.count, len(jobs)))]
        try:
            while queue or any(worker.job for worker in crew):
                for worker in crew:
                    if worker.idle and queue:
                        worker.give(queue.next_for(worker, crew))
                wait([worker.pipe for worker in crew], timeout=HEARTBEAT)
                for i, worker in enumerate(crew):
                    message = worker.hear()
                    if isinstance(message, Outcome):
                        yield message
                    elif isinstance(message, _Ready):
                        stillborn = 0
                    elif isinstance(message, _Death):
                        crew[i] = _Worker(self.start)
                        if worker.job is None:
                            stillborn += 1
                            _give_up_if(stillborn, message)
                            continue
                        deaths[worker.job] += 1
                        if deaths[worker.job] < TRIES:
                            queue.put_back(worker.job)
                        else:
                            yield Outcome(
                                worker.job,
                                failure=f"{message.how} with this job in hand, {TRIES} times",
                            )
        finally:
            for worker in crew:
                worker.end()


class _Ready(NamedTuple):
    """A worker can take jobs."""


class _Refusal(NamedTuple):
    """A worker cannot be set up, for a reason the user can put right."""

    why: str


class _Death(NamedTuple):
    """A worker is gone."""

    how: str


class _Worker:
    """The near end of a worker process."""

    def __init__(self, start: Callable[[], Work]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end, start), daemon=True)
        self.process.start()
        far_end.close()  # so that the pipe ends when the worker does
        self.idle = False
        self.job: Job | None = None
        self.last: Input | None = None

    def give(self, job: Job) -> None:
        self.idle, self.job, self.last = False, job, job.input
        with suppress(OSError):  # it died idle; hear() will say so
            self.pipe.send(job)

    def hear(self) -> Outcome | _Ready | _Death | None:
        """What the worker has to say, if anything."""
        alive = (
            self.process.is_alive()
        )  # asked first: what a dead worker said last is still in the pipe
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
    """Jobs waiting, kept together by input: a worker that has prepared an input goes on with it."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._groups: dict[Input, deque[Job]] = {}
        for job in jobs:
            self._groups.setdefault(job.input, deque()).append(job)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def put_back(self, job: Job) -> None:
        self._groups.setdefault(job.input, deque()).appendleft(job)

    def next_for(self, worker: _Worker, crew: Iterable[_Worker]) -> Job:
        """A job on the worker's own input, else on one that nobody else has prepared, else any."""
        elsewhere = {other.last for other in crew if other is not worker}
        own = worker.last if worker.last in self._groups else None
        fresh = next((group for group in self._groups if group not in elsewhere), None)
        group = own or fresh or next(iter(self._groups))
        job = self._groups[group].popleft()
        if not self._groups[group]:
            del self._groups[group]
        return job


def _serve(pipe: Connection, start: Callable[[], Work]) -> None:
    """The life of a worker: set up once, then one job after the other until the near end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns the store
    try:
        work = start()
    except Exception as error:
        pipe.send(_Refusal(_reason(error)))
        return
    try:
        pipe.send(_Ready())
        while True:
            pipe.send(_attempt(work, pipe.recv()))
    except (EOFError, OSError):
        return


def _attempt(work: Work, job: Job) -> Outcome:
    try:
        return work(job)
    except Exception as error:  # whatever goes wrong in one job is that job's own result
        return Outcome(job, failure=_reason(error))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _give_up_if(stillborn: int, death: _Death) -> None:
    if stillborn >= TRIES:
        raise UserError(
            f"worker processes do not start: {death.how}, {stillborn} times. In a script, call measure under "
            "`if __name__ == '__main__':`; or use workers=1."
        )
