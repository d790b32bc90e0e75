"""Run jobs on the workers of a dask cluster, any of which may die meanwhile; start clusters."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lipscope._types import UserError
from lipscope.study.jobs import Outcome, Work, attempt, check_engine, reason

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT = 20
"""Seconds to wait for a scheduler."""

BATCH_SYSTEMS = {
    "slurm": "SLURMCluster",
    "pbs": "PBSCluster",
    "lsf": "LSFCluster",
    "sge": "SGECluster",
    "oar": "OARCluster",
    "htcondor": "HTCondorCluster",
}
"""Names before the colon, and the classes of dask-jobqueue behind them."""

TRIES = 3
LOOK_EVERY = 1.0
"""Seconds between two looks at the list of workers."""

WAITING = 60.0
"""Seconds without any worker after which, and every so often, the log says so."""

Start = Callable[[int], Work]
"""Called once on each worker with its number of threads; returns the work it does there."""


log = logging.getLogger(__name__)


class SchedulerLostError(UserError):
    """The connection to the scheduler is gone; what was measured is saved."""

    exit_code = 3  # incomplete, and not for want of the right options


@dataclass(frozen=True)
class Engine:
    """Runs jobs on every worker that a scheduler lists, one at a time on each.

    A worker that dies costs its current job one try of three, and nothing else. Dask itself would
    blame every task that is queued on a dead worker, so that neighbours of a deadly job fail with
    it; here no worker ever has a second task, and the tries are counted on this side.

    client:  a connection to the scheduler
    restore: asks for workers again that have ended, where lipscope started the cluster
    """

    client: Client
    restore: Callable[[], None] = lambda: None

    def run(self, start: Start, jobs: Sequence[Any]) -> Generator[Outcome]:
        """One outcome per job, in the order in which they are done.

        Args:
            start: Sets up the work on a worker, before its first job.
            jobs: The jobs; those of one `group` share what a worker prepares.

        Raises:
            UserError: If the work cannot be set up, for a reason that the user can fix.
            SchedulerLostError: If the scheduler ends.
        """
        run = _Run(self, start, _Queue(jobs))
        try:
            while run.queue or any(worker.job for worker in run.workers.values()):
                yield from run.refresh()
                run.dispatch()
                yield from run.collect()
        except UserError:
            raise
        except Exception:
            run.ask_for_workers()  # raises if the reason is that the scheduler has just ended
            raise
        finally:  # cancel what is still running, after an error or an interrupt
            left = [worker.future for worker in run.workers.values() if worker.future is not None]
            with suppress(Exception):
                if left and self.client.status == "running":
                    self.client.cancel(left)


@dataclass
class _Worker:
    """A worker, seen from here: what it runs now, and what it holds."""

    address: str
    future: Future | None = None
    ready: bool = False
    job: Any = None
    last: Hashable = None


@dataclass
class _Run:
    """The state of one call of `Engine.run`."""

    engine: Engine
    start: Start
    queue: _Queue
    token: str = field(default_factory=lambda: uuid4().hex)
    workers: dict[str, _Worker] = field(default_factory=dict)
    finished: SimpleQueue[tuple[_Worker, Future]] = field(default_factory=SimpleQueue)
    deaths: Counter[Any] = field(default_factory=Counter)
    failed_starts: int = 0
    next_look: float = 0.0
    next_word: float = field(default_factory=lambda: time.monotonic() + WAITING)

    def refresh(self) -> Generator[Outcome]:
        """Compare the scheduler's list of workers with ours, once a second."""
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + LOOK_EVERY
        listed = self.ask_for_workers()
        # Most schedulers keep the task of a dead worker waiting for another one, and none may run
        # it: the worker is missed here.
        for address in self.workers.keys() - listed:
            yield from self.mark_dead(self.workers[address])
        for address in listed:
            self.workers.setdefault(address, _Worker(address))
        self.engine.restore()
        if self.workers:
            self.next_word = now + WAITING
        elif now > self.next_word:
            self.next_word = now + WAITING
            log.info("waiting for workers: the scheduler lists none")

    def ask_for_workers(self) -> dict[str, int]:
        """The address and the number of threads of every worker."""
        try:
            if self.engine.client.status != "running":
                raise OSError("no connection")
            return self.engine.client.nthreads()
        except OSError as error:
            raise SchedulerLostError(
                "the scheduler ended, or cannot be reached; what was measured is saved if --out "
                "was given: run the same command again to resume"
            ) from error

    def dispatch(self) -> None:
        """Give every idle worker a job; before its first, the work itself."""
        every = self.workers.values()
        starting = sum(worker.future is not None and not worker.ready for worker in every)
        for worker in every:
            if worker.future is not None or not self.queue:
                continue
            if worker.ready:
                worker.job = self.queue.next_for(worker, every)
                worker.last = worker.job.group
                self.submit(worker, run_job, self.token, worker.job)
            elif starting < len(self.queue):
                starting += 1
                self.submit(worker, set_up, self.token, self.start)

    def submit(self, worker: _Worker, function: Callable[..., Any], *arguments: Any) -> None:
        future = worker.future = self.engine.client.submit(
            function, *arguments, workers=[worker.address], retries=0, pure=False
        )
        future.add_done_callback(lambda done: self.finished.put((worker, done)))

    def collect(self) -> Generator[Outcome]:
        """What the next worker has to say, if one has within a second."""
        try:
            worker, future = self.finished.get(timeout=LOOK_EVERY)
        except Empty:
            return
        if self.workers.get(worker.address) is not worker or worker.future is not future:
            return  # it was missed before; its job is elsewhere
        try:
            found = self.result(worker)
        except _WorkerLostError:
            yield from self.mark_dead(worker)
            return
        job = worker.job
        worker.future = None
        worker.job = None
        if job is None:
            if isinstance(found, Exception):
                raise UserError(f"a worker cannot be set up: {reason(found)}")
            self.failed_starts = 0
            worker.ready = True
        elif isinstance(found, Outcome):
            yield found
        elif isinstance(found, Exception):
            yield Outcome(job, failure=reason(found))
        else:  # another command has used the worker since, and only one model is kept there
            worker.ready = False
            self.queue.put_back(job)

    def result(self, worker: _Worker) -> Any:
        """What a task returned, or the exception it ended with."""
        from distributed import KilledWorker, TimeoutError

        patience = LOOK_EVERY
        future = worker.future
        assert future is not None
        while future.status in ("finished", "pending"):
            try:
                return future.result(timeout=patience)
            except TimeoutError:
                # A result that its worker has taken along is not coming; one that is large, is.
                patience *= 2
                if worker.address not in self.ask_for_workers():
                    raise _WorkerLostError from None
            except Exception as error:
                if future.status == "finished":
                    return error
        # Nothing here is cancelled before it is marked dead: this is the end of a connection.
        self.ask_for_workers()
        failure = future.exception(timeout=patience) if future.status == "error" else None
        if failure is None or isinstance(failure, KilledWorker):
            raise _WorkerLostError
        return failure

    def mark_dead(self, worker: _Worker) -> Generator[Outcome]:
        """Forget a dead worker; its job is tried again, or has failed for good."""
        del self.workers[worker.address]
        if worker.future is not None:
            worker.future.cancel()
        if worker.job is None:
            self.failed_starts += worker.future is not None
            if self.failed_starts >= TRIES:
                raise UserError(
                    f"workers do not start: {TRIES} in a row died while they were set up; is there "
                    "enough memory? In a script, call measure under `if __name__ == '__main__':`"
                )
            return
        # The job may have killed its worker, or merely been there.
        self.deaths[worker.job] += 1
        if self.deaths[worker.job] < TRIES:
            self.queue.put_back(worker.job)
        else:
            failure = f"the worker died while running this job, {TRIES} times"
            yield Outcome(worker.job, failure=failure)


class _WorkerLostError(Exception):
    """A worker died before its result was here."""


class _Queue:
    """Waiting jobs by group, so that a worker keeps the input it has prepared."""

    def __init__(self, jobs: Iterable[Any]) -> None:
        self._groups: dict[Hashable, deque[Any]] = {}
        for job in jobs:
            self._groups.setdefault(job.group, deque()).append(job)

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def put_back(self, job: Any) -> None:
        self._groups.setdefault(job.group, deque()).appendleft(job)

    def next_for(self, worker: _Worker, workers: Iterable[_Worker]) -> Any:
        """A job on the worker's own input, else on one no other worker has prepared, else any."""
        elsewhere = {other.last for other in workers if other is not worker}
        own = worker.last if worker.last in self._groups else None
        fresh = next((group for group in self._groups if group not in elsewhere), None)
        group = own or fresh or next(iter(self._groups))
        job = self._groups[group].popleft()
        if not self._groups[group]:
            del self._groups[group]
        return job


@contextmanager
def open_engine(workers: int = 1, cluster: str | None = None) -> Iterator[Engine | None]:
    """The engine for `workers` and `cluster`, which ends with the block.

    Args:
        workers: Number of worker processes on this machine.
        cluster: A scheduler (tcp://host:port or tls://host:port), or a batch system and a number
            of its jobs (slurm:64); see docs/scaling.md.

    Yields:
        The engine; None if jobs are to be run in this process.

    Raises:
        UserError: If dask is not installed, or the cluster cannot be reached.
    """
    check_engine(workers, cluster)
    if cluster is None and workers == 1:
        yield None
        return
    # dask reports deaths and lost connections, which the engine handles and names.
    import distributed  # noqa: F401  # it sets the levels of its loggers

    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("distributed", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with _local(workers) if cluster is None else _named(cluster) as engine:
        log.info("the dashboard is at %s", engine.client.dashboard_link)
        yield engine


@contextmanager
def _local(workers: int) -> Iterator[Engine]:
    """Processes on this machine, which nobody but this process can talk to."""
    import dask
    from distributed import LocalCluster, Security

    settings = {
        # With no allowance, a task is reported with its worker's death rather than kept waiting.
        "distributed.scheduler.allowed-failures": 0,
        "distributed.comm.timeouts.connect": "120s",  # a busy machine is no reason to give up
    }
    try:
        with dask.config.set(settings), _interrupts_for_this_process_alone():
            cluster = LocalCluster(
                n_workers=workers,
                # The threads of torch: workers share the cores.
                threads_per_worker=max(1, (os.cpu_count() or 1) // workers),
                processes=True,
                host="127.0.0.1",
                protocol="tls://",
                # On a machine with other users, loopback alone keeps nobody from sending us a
                # pickle.
                security=Security.temporary(),
                dashboard_address="127.0.0.1:0",
                # By default, workers of older versions of dask listen on every interface.
                worker_dashboard_address="127.0.0.1:0",
                memory_limit=0,
                silence_logs=logging.CRITICAL,
            )
    except (OSError, RuntimeError, TimeoutError) as error:
        raise UserError(
            f"worker processes do not start ({' '.join(str(error).split())[:100]}); in a script, "
            "call measure under `if __name__ == '__main__':`, or use workers=1"
        ) from error
    with _connected(cluster) as client:
        yield Engine(client, restore=lambda: cluster.scale(workers))


@contextmanager
def _interrupts_for_this_process_alone() -> Iterator[None]:
    """Start threads and processes that do not receive Ctrl-C, which is for the one that writes."""
    # Both inherit the mask: the thread of dask's loop, and so the workers it starts later on. But
    # the first start of a process also starts Python's resource tracker, which lifts the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _named(cluster: str) -> Iterator[Engine]:
    """What the option --cluster names."""
    kind, colon, rest = cluster.partition(":")
    if "://" in cluster:
        with _connected(cluster) as client:
            yield Engine(client)
    elif kind in BATCH_SYSTEMS and colon:
        if not rest.isdecimal() or int(rest) < 1:
            raise UserError(f"{cluster}: give the number of batch jobs, as in {kind}:64")
        # With several workers in a job, dask would not notice that the job has ended.
        options = {"processes": 1}
        with _started("dask_jobqueue", BATCH_SYSTEMS[kind], options, int(rest)) as engine:
            yield engine
    else:
        raise UserError(
            f"{cluster!r} is not a cluster; give the address of a scheduler (tcp://host:port), or "
            f"a batch system with a number of jobs ({', '.join(BATCH_SYSTEMS)}; as in slurm:64)"
        )


@contextmanager
def _started(module: str, name: str, options: dict[str, Any], workers: int) -> Iterator[Engine]:
    """A cluster of some class, started now and ended with the block."""
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as error:
        package = module.split(".")[0].replace("_", "-")
        raise UserError(
            f"{name} needs {package}; install it with: pip install {package}"
        ) from error
    with _one_line(name), _interrupts_for_this_process_alone():
        cluster = kind(**options)

    def restore() -> None:
        cluster.scale(workers)

    async def grow() -> None:
        restore()
        await cluster  # raises what `scale` alone would only log: no sbatch, or a refusal of it

    with _connected(cluster) as client:
        with _one_line(name):
            cluster.sync(grow)
        yield Engine(client, restore)


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """What keeps a cluster from starting, in one line."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"{name} cannot be started: {why}") from error


@contextmanager
def _connected(cluster: Any) -> Iterator[Client]:
    """A client of the scheduler at an address, or of a cluster, which ends with the block."""
    from distributed import Client

    client: Any = None
    try:
        try:
            client = Client(cluster, timeout=CONNECT, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(f"no scheduler answers at {cluster}: {why}") from error
        # A result that is lost on its way leaves a task of dask behind that nobody waits for.
        loop: Any = client.loop
        loop.asyncio_loop.set_exception_handler(lambda loop, context: None)
        yield client
    finally:
        try:
            with suppress(Exception):
                client.close()
        finally:  # a second Ctrl-C must not leave jobs in a batch system
            with suppress(Exception):  # an address has nothing to close
                cluster.close()


# What follows runs on a worker. One work is kept there, the newest: a model can be large.
_work: dict[str, Work] = {}
_alone = Lock()


def set_up(token: str, start: Start) -> None:
    """Set up the work of a run on this worker."""
    from distributed import get_worker

    with _alone:
        _work.clear()
        _work[token] = start(get_worker().state.nthreads)


def run_job(token: str, job: Any) -> Outcome | None:
    """The outcome of a job; None if the work of its run is not here any more."""
    with _alone:  # a worker with several threads gives them to torch
        work = _work.get(token)
        return None if work is None else attempt(work, job)
