"""What every test shares: one thread per worker, checked shapes, and no GPU tests without a GPU."""

import os
import signal

# Set before torch starts its thread pools: pytest runs one worker per core.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)
# A shell starts background jobs with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# An int may stand for a float, as PEP 484 and mypy have it.
jaxtyping.install_import_hook(
    "lipscope", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)
pytest.register_assert_rewrite("tests.checks")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("quick", "wide"),
        help="quick: the first case of every parametrised test, except those marked wide; "
        "wide: all the others. By default both.",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            if not item.get_closest_marker("wide"):
                first.setdefault(item.nodeid.partition("[")[0], item)
        quick = set(first.values())
        chosen = [item for item in items if (item in quick) == (part == "quick")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
