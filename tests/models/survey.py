"""Every architecture that transformers can build small: measured, refused, or worse.

    python -m tests.models.survey --workers 16         # all of them; resumes
    python -m tests.models.survey --only bert llama    # some of them, again, with their reasons
    python -m tests.models.survey --store FILE...      # keep results, and write the pages
    python -m tests.models.survey --pages              # the pages, from the results that are kept

An architecture that can be measured is also asked for its budgets in bf16, int8 and kv4, and a
clean bf16 port of it and one with a planted bug are compared with it (survey_budgets.py). Each one
runs in a process of its own, and appends a JSON line to --results, by default in the folder for
temporary files; --store merges such files into benchmarks/results. It needs torch, transformers
and the packages that lipscope itself needs; no network, no GPU.
"""

import argparse
import copy
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import transformers

from lipscope._types import UserError
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models._transformers_internals import CONFIG_MAPPING, random_model
from lipscope.models.loading import _model_classes, load
from lipscope.models.scopes import SCOPES
from tests.models.small import small_configs
from tests.models.survey_budgets import budget_cells, samples_of
from tests.models.survey_page import STORED, stored, write_pages

SECONDS = 60
"""Processor time that one architecture may take to be measured, and again for each budget."""

DEADLINE = 420
"""Seconds after which the process of an architecture is stopped, whatever it does."""

RESULTS = Path(tempfile.gettempdir()) / "lipscope-survey.jsonl"
LARGEST = 30_000_000
"""Largest number of weights that counts as small."""


class TooSlow(BaseException):
    """The time limit; not an Exception, so that nothing on the way takes it for a refusal."""


def examine(name: str) -> dict[str, Any]:
    """One architecture: its outcome, the scopes that were measured, and its budgets."""
    measured: list[tuple[Any, dict[str, Any]]] = []
    row = {"name": name, **limited(lambda: _examine(name, measured))}
    if row["outcome"] == "measured":
        model, inputs = measured[-1]
        given = samples_of(model, inputs)
        row["budgets"] = {cell: limited(work) for cell, work in budget_cells(model, given)}
    return row


def limited(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` finds within the time limit, or how it failed; with the seconds it took."""

    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    started = time.process_time()
    try:
        found = work()
    except TooSlow:
        found = {"outcome": "slow", "reason": f"more than {SECONDS} s"}
    except UserError as error:
        found = {"outcome": "refused", "reason": str(error)}
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]} at {_where(error)}"
        found = {"outcome": "crashed", "reason": reason}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {**found, "seconds": round(time.process_time() - started, 1)}


def _examine(name: str, measured: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    reasons, refusal = [], None
    try:
        for config in small_configs(CONFIG_MAPPING[name]):
            kinds = _model_classes(config)
            if not kinds:
                return {"outcome": "refused", "reason": "no trunk with hidden states"}
            try:
                module = _build(kinds[0], config)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
                continue
            try:
                model = load(module)
                inputs = _inputs(model)
                measured.append((model, inputs))
                return {"class": type(module).__name__, **_measure(model, inputs)}
            except UserError as error:
                # Sizes that do not fit together look like a model that needs other inputs.
                refusal = refusal or error
                if "does not run" not in str(error):
                    break
    except Exception as error:
        if not isinstance(error, UserError) and "small.py" not in _where(error):
            raise
        reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
    if refusal is not None:
        raise refusal
    return {"outcome": "not built", "reason": (reasons or ["no small configuration"])[0]}


def _build(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        empty = random_model(kind, copy.deepcopy(config))
    if sum(p.numel() for p in empty.parameters()) > LARGEST:
        raise ValueError("too large")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return random_model(kind, config).eval()


def _where(error: BaseException) -> str:
    """The lines of lipscope and its tests behind an error."""
    frames = traceback.extract_tb(error.__traceback__)
    here = [f for f in frames if "lipscope" in f.filename or "/tests/" in f.filename]
    return " ".join(f"{Path(f.filename).name}:{f.lineno}" for f in here[-3:])


def _measure(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The scopes at which the norm of the Jacobian is found, at the first and the last layer."""
    survey = model.survey(**inputs)
    scopes, reasons = [], []
    for scope in SCOPES:
        try:
            model.check_scopes([scope])
            for layer in {model.attending[0], model.attending[-1]} if scope != "model" else {None}:
                site = survey.site(scope, layer)
                found = spectral_norm(
                    jacobian(site.f, site.X), tol=0.1, solver=Solver(max_steps=20)
                )
                assert torch.as_tensor(found.value).isfinite().all(), f"no number at {scope}"
        except UserError as error:
            reasons.append(f"{scope}: {error}")
        else:
            scopes.append(scope)
    if not scopes:
        return {"outcome": "refused", "reason": "; ".join(reasons)}
    return {"outcome": "measured", "scopes": scopes, "routed": model.preflight.routed}


def _inputs(model: Any) -> dict[str, Any]:
    """A short input of the kind that the model reads."""
    kind, config = model.trunk.main_input_name, model.trunk.config
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "input_ids":
        return {"input_ids": model._sample_input().kwargs["input_ids"]}
    if kind == "pixel_values":
        return {"pixel_values": model._sample_input().kwargs["pixel_values"]}
    generator = torch.Generator().manual_seed(0)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    frames = getattr(config, "max_source_positions", 32)
    shapes = {
        "input_values": [(1, 4000), (1, 1, 4000), (1, getattr(config, "max_length", 64), mels)],
        "input_features": [
            (1, mels, 2 * frames),
            (1, 64, mels),
            (1, 64, getattr(config, "feature_projection_input_dim", mels)),
        ],
        "pixel_values_videos": [(1, 4, 3, 32, 32)],
    }
    for shape in shapes.get(kind, []):
        inputs = {kind: torch.randn(shape, generator=generator, dtype=torch.float64)}
        try:
            model.survey(inputs=inputs)
        except UserError:
            continue
        return {"inputs": inputs}
    model.layers  # noqa: B018 (raises the error that says how)
    raise AssertionError(kind)


def examine_all(names: Iterable[str], workers: int, results: Path) -> Counter[str]:
    """Examine architectures in processes of their own, and append a line for each of them."""
    context = multiprocessing.get_context("fork")
    waiting, counts = list(names)[::-1], Counter[str]()
    running: dict[Any, tuple[str, ForkProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            end, other = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(name, other))
            process.start()
            other.close()
            running[end] = name, process, time.monotonic()
        for end in multiprocessing.connection.wait(list(running), timeout=5.0):
            row = _received(end, *running.pop(end)[:2])
            counts.update(_keep(row, results))
        for end, (name, process, started) in list(running.items()):
            if time.monotonic() - started > DEADLINE:
                process.kill()
                del running[end]
                late = {"name": name, "outcome": "slow", "reason": f"more than {DEADLINE} s"}
                counts.update(_keep(late, results))
    return counts


def _send(name: str, end: Any) -> None:
    end.send(examine(name))


def _received(end: Any, name: str, process: ForkProcess) -> dict[str, Any]:
    try:
        row = end.recv()
    except EOFError:
        row = {"name": name, "outcome": "crashed", "reason": "the process died"}
    process.join()
    return row


def _keep(row: dict[str, Any], results: Path) -> list[str]:
    """Append a row to the results, print it, and list its outcomes."""
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    cells = row.get("budgets", {})
    outcomes = [f"{cell} {found['outcome']}" for cell, found in cells.items()]
    reasons = [found["reason"] for found in (row, *cells.values()) if "reason" in found]
    print(row["name"], row["outcome"], ", ".join([*outcomes, *reasons]), flush=True)
    return [row["outcome"], *outcomes]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """What a file of results holds, by name; a line that was cut short does not count."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["name"]] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures (model_type)")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of JSON lines")
    parser.add_argument("--store", nargs="+", type=Path, metavar="FILE", help="keep these results")
    parser.add_argument("--pages", action="store_true", help="write the pages of the results kept")
    arguments = parser.parse_args()
    if arguments.store or arguments.pages:
        found = stored()
        for path in arguments.store or ():
            found |= read_results(path)
        STORED.write_text(json.dumps([found[name] for name in sorted(found)], indent=1) + "\n")
        write_pages(found)
        return
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    done = read_results(arguments.results)
    names = arguments.only or [name for name in CONFIG_MAPPING if name not in done]
    for outcome, count in sorted(examine_all(names, arguments.workers, arguments.results).items()):
        print(f"{count:5} {outcome}")


if __name__ == "__main__":
    main()
