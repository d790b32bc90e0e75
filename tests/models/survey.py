"""Every architecture that transformers can build small: measured, refused, or worse.

    python -m tests.models.survey                # all of them, about an hour on one core; resumes
    python -m tests.models.survey bert llama     # some of them, with their reasons
    python -m tests.models.survey --new-scopes   # those measured before, at scopes added since
    python -m tests.models.survey --page > docs/models.md      # the page, from the results

Results are kept in the folder for temporary files, one JSON line per architecture.
"""

import argparse
import copy
import json
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers

from lipscope._types import UserError
from lipscope.linalg.differentiate import jacobian
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.models._transformers_internals import CONFIG_MAPPING, random_model
from lipscope.models.loading import _base_classes, load
from lipscope.models.scopes import SCOPES
from tests.models.small import small_configs

SECONDS = 60
"""Processor time that one architecture may take."""

RESULTS = Path(tempfile.gettempdir()) / "lipscope-survey.jsonl"
LARGEST = 30_000_000
"""Largest number of weights that counts as small."""


class TooSlow(BaseException):
    """The time limit; not an Exception, so that nothing on the way takes it for a refusal."""


def examine(name: str, known: Collection[str] = ()) -> dict[str, Any]:
    """One architecture: its outcome, the scopes that were measured, or the reason why not.

    Scopes in `known` have been measured before: their sites are found again, not solved.
    """

    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    started = time.process_time()
    try:
        found = _examine(name, known)
    except TooSlow:
        found = {"outcome": "slow", "reason": f"more than {SECONDS} s"}
    except UserError as error:
        found = {"outcome": "refused", "reason": str(error)}
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]} at {_where(error)}"
        found = {"outcome": "crashed", "reason": reason}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"name": name, **found, "seconds": round(time.process_time() - started, 1)}


def _examine(name: str, known: Collection[str] = ()) -> dict[str, Any]:
    reasons, refusal = [], None
    try:
        for config in small_configs(CONFIG_MAPPING[name]):
            kinds = _base_classes(config)
            if not kinds:
                return {"outcome": "refused", "reason": "no trunk with hidden states"}
            try:
                module = _build(kinds[0], config, name)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
                continue
            try:
                return {"class": type(module).__name__, **_measure(module, known)}
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


def _build(kind: Any, config: Any, name: str) -> Any:
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


def _measure(module: Any, known: Collection[str]) -> dict[str, Any]:
    """The scopes at which the norm of the Jacobian is found, at the first and the last layer."""
    model = load(module)
    survey = model.survey(**_inputs(model))
    scopes, reasons = [], []
    for scope in SCOPES:
        try:
            model.check_scopes([scope])
            for layer in {0, model.layers - 1} if scope != "model" else {None}:
                site = survey.site(scope, layer)
                if scope in known:
                    continue
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


def results() -> dict[str, dict[str, Any]]:
    """What has been found so far, by name; a line that was cut short does not count."""
    found = {}
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            found[row["name"]] = row
    return found


def _keep(row: dict[str, Any]) -> dict[str, Any]:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


MISFIT = (
    "size of tensor|split_with_sizes|shape '|shapes cannot|expected input|doesn't match model|"
    "out of range|repeat_interleave|without overflow|`sliding_window`"
)
"""What a model says when its small sizes do not fit together; its own may well do."""

WHY = {
    "sizes in floating point": "computes sizes in floating point: rounding cannot be probed",
    "no trunk": "part of another model, or a task without hidden states",
    "lipscope's attention": "attention that lipscope cannot replace, and no scope around it",
    "own attention code": "attention that lipscope cannot replace, and no scope around it",
    "map of a single sequence": "attention that lipscope cannot replace, and no scope around it",
    "cuts a sample": "no sequences of tokens inside: convolutions, windows",
    "non-finite": "values that are not finite with small random weights",
    "does not run on": "needs more inputs: give them all with `inputs=`",
    "not tokens; in Python": "reads sound or something else: give it with `inputs=`",
    "not sequences": "no sequences of tokens inside: convolutions, windows",
    "concatenates": "no sequences of tokens inside: convolutions, windows",
    "cannot find its blocks": "no list of blocks",
    "its encoder": "an encoder that cannot be run alone",
    "hidden states": "no hidden states",
}
"""Groups of refusals, by a piece of the sentence; the first that matches."""


def page(found: dict[str, dict[str, Any]]) -> str:
    """docs/models.md: what was measured, by scopes, and what was not, by reason."""
    counts = Counter(row["outcome"] for row in found.values())
    measured, refused = defaultdict(list), defaultdict(list)
    for name, row in sorted(found.items()):
        if row["outcome"] == "refused" and re.search(MISFIT, row["reason"]):
            counts.subtract(["refused"])
            counts.update(["not built"])
            continue
        if row["outcome"] == "measured":
            measured[", ".join(row["scopes"])].append(f"`{name}`")
        elif row["outcome"] == "refused":
            why = [group for piece, group in WHY.items() if piece in row["reason"]]
            refused[(why or ["another reason"])[0]].append(f"`{name}`")
    return PAGE.format(
        version=transformers.__version__,
        names=len(list(CONFIG_MAPPING)),
        total=len(found),
        measured=counts["measured"],
        refused=counts["refused"],
        crashed=counts["crashed"] + counts["slow"],
        not_built=counts["not built"],
        table=_table(("scopes", "architectures (`model_type`)"), measured),
        refusals=_table(("why", "architectures (`model_type`)"), refused),
    )


def _table(heads: tuple[str, str], groups: dict[str, list[str]]) -> str:
    rows = [heads, ("---", "---")]
    for group, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        rows.append((group, f"{len(names)}: {', '.join(names)}"))
    return "\n".join(f"| {left} | {right} |" for left, right in rows)


PAGE = """# Architectures one by one

Every architecture of transformers {version} was built with small random weights and measured at its
first and last layer, at every [scope](scopes.md). This page is generated:
`python -m tests.models.survey` measures, and the same with `--page` prints the page.

| of the {names} names in transformers' list of architectures, examined | {total} |
|---|---|
| measured | {measured} |
| refused, with a sentence that says why | {refused} |
| crashed, or took more than a minute | {crashed} |
| nothing known: needs another package, or no small sizes that fit together | {not_built} |

## Measured

{table}

## Refused

Some of these run with more inputs than token ids, or with sound. In Python, give them all by name,
each with one row per sample: `ls.measure(model, inputs={{"input_features": X}}, scopes=["block"])`.

{refusals}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures (model_type); all by default")
    parser.add_argument("--page", action="store_true", help="print docs/models.md")
    parser.add_argument("--new-scopes", action="store_true", help="measure scopes added since")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = results()
    if not arguments.page:
        for name in arguments.names or CONFIG_MAPPING:
            known = found.get(name, {}).get("scopes", ()) if arguments.new_scopes else ()
            if name in found and not arguments.names and not (known and set(SCOPES) - set(known)):
                continue
            # Written first: what kills the process is found in the results, and not tried again.
            _keep({"name": name, "outcome": "crashed", "reason": "the process died"})
            found[name] = _keep(examine(name, known))
            print(name, found[name]["outcome"], found[name].get("reason", ""), flush=True)
    print(page(found) if arguments.page else Counter(row["outcome"] for row in found.values()))


if __name__ == "__main__":
    main()
