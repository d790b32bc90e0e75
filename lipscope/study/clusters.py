"""Where workers come from: processes on this machine, a scheduler, or a batch system."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from lipscope._types import UserError
from lipscope.study.engines import Engine

if TYPE_CHECKING:
    from distributed import Client

PACKAGES = ("distributed", "cryptography")
"""What the extra `cluster` installs."""

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

log = logging.getLogger(__name__)


def check_engine(workers: int, cluster: str | None) -> None:
    """Raise UserError for a number of workers or a cluster that cannot be, before work begins."""
    if workers < 1:
        raise UserError(f"workers must be at least 1, got {workers}")
    if cluster is not None and workers > 1:
        raise UserError(
            "workers are processes of this machine; give workers or a cluster, not both"
        )
    if (cluster is not None or workers > 1) and not all(map(find_spec, PACKAGES)):
        raise UserError(
            "workers and clusters need dask; install it with: pip install 'lipscope[cluster]'"
        )


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
    _silence()
    with _local(workers) if cluster is None else _named(cluster) as engine:
        log.info("the dashboard is at %s", engine.client.dashboard_link)
        yield engine


def _silence() -> None:
    """Keep dask from reporting deaths and lost connections, which the engine handles and names."""
    import distributed  # noqa: F401  # it sets the levels of its loggers

    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("distributed", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


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
    with _closing(cluster), _connected(cluster) as client:
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

    with _closing(cluster), _connected(cluster) as client:
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
def _closing(cluster: Any) -> Iterator[None]:
    """End the cluster with the block, whatever it is doing."""
    try:
        yield
    finally:
        with suppress(Exception):
            cluster.close()


@contextmanager
def _connected(cluster: Any) -> Iterator[Client]:
    """A client of a scheduler."""
    from distributed import Client

    try:
        client = Client(cluster, timeout=CONNECT, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"no scheduler answers at {cluster}: {why}") from error
    try:
        # A result that is lost on its way leaves a task of dask behind that nobody waits for.
        loop: Any = client.loop
        loop.asyncio_loop.set_exception_handler(lambda loop, context: None)
        yield client
    finally:
        with suppress(Exception):
            client.close()
