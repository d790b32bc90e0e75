"""Random bad Python arguments over the public API: a result or a UserError, and nothing else.

    python -m tests.bad_calls 1000            # minutes; the seed is the second argument

A call that works gets one or two arguments of the wrong type, size or value. An exception other
than UserError, a call that takes longer than the time limit or memory without a check is a fault.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import logging

import lipscope as ls
from lipscope.papers.charlm import train_character_model
from tests.study.tiny import PROSE, save_tiny

LIMIT = 30
"""Seconds of CPU time for one call; the calls that work take at most a few."""


class Odd:
    """An object of no use to anyone."""


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 10**30, 10**5000, 2**63, 2**64, 0.0, -0.0, 1.5,
    -2.5, 1e300, 1e-300, math.nan, math.inf, -math.inf, 1 + 2j, "", "3", "abc", "\x1b[31m",
    b"bytes", [], [1, 2], [None], ["a"], (), (1,), {}, {"a": 1}, {1, 2}, range(3), object(), Odd(),
    len,    lambda x: x, Path("no/such/place"), Path(""), torch.float16, torch.device("cpu"),
    torch.zeros(0), torch.zeros(()), torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, 3),
    torch.zeros(4, 3, dtype=torch.float64), torch.full((4, 3), math.nan, dtype=torch.float64),
    torch.full((4, 3), math.inf, dtype=torch.float64), torch.ones(4, 3, dtype=torch.int64),
    torch.ones(4, 3, dtype=torch.bool), torch.ones(4, 3, dtype=torch.complex128),
    torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(4, 3).numpy(), torch.ones(2, 4, 3, 1),
    torch.ones(4, 3, device="meta"), torch.eye(3).to_sparse(),
]  # fmt: skip

Call = tuple[str, Callable[..., Any], dict[str, Any]]


def calls(place: Path) -> Iterator[Call]:
    """Calls that work, each as small as it comes."""
    torch.manual_seed(0)
    double = torch.float64
    W, X = torch.randn(3, 3, dtype=double), torch.randn(4, 3, dtype=double)
    f = ls.SelfAttention(W, W, W)
    weights = given(Q=W, K=W, V=W)
    bare = given(heads=1, kv_heads=1, biases=None, causal=True, mask=None, window=2, padding=None)
    yield "SelfAttention", ls.SelfAttention, weights | bare | given(O=W, kernel=ls.Dot())
    yield (
        "SelfAttention(X)",
        lambda X, **more: ls.SelfAttention(**more)(X),
        weights | bare | given(X=X),
    )
    yield "Dot", ls.Dot, given(scale=1.0, softcap=None, sinks=None, rope=None)
    yield "L2", ls.L2, given(scale=1.0, softcap=None, sinks=None)
    yield "Rope", ls.Rope, given(cos=torch.ones(4, 2), sin=torch.zeros(4, 2))
    yield "Ball", ls.Ball, given(R=1.0, n=3)
    yield "Around", ls.Around, given(X=X, r=0.5)
    yield "Point", ls.Point, given(X=X)
    yield "Everywhere", ls.Everywhere, given(n=3)
    yield "Normed", ls.Normed, given(weight=torch.ones(3, dtype=double), n=4, bias=None)
    yield "Solver", solved, given(f=f, X=X, max_steps=30, memory=None, failure=1e-9, seed=0)
    options = given(tol=1e-3, norm="2", precision="native", gap=None, solver=None, splitting=False)
    yield "local_lipschitz", ls.local_lipschitz, given(f=f, X=X) | options
    yield "jacobian", ls.jacobian, given(f=f, X=X)
    J = ls.jacobian(f, X)
    yield "spectral_norm", ls.spectral_norm, given(J=J, tol=1e-3, gap=None, start=None, solver=None)
    yield "singular_triplets", ls.singular_triplets, given(J=J, k=2, tol=1e-3, solver=None)
    qkv = {name: torch.randn(1, 1, 4, 3) for name in "qkv"}
    extras = given(scale=1.0, causal=True, window=2, mask=None, padding=None, softcap=None)
    yield "attend", ls.attend, qkv | extras | given(sinks=None)
    for domain in (ls.Ball(R=1.0, n=4), ls.Point(X), ls.Around(X, 0.1)):
        yield "bounds", ls.bounds, given(f=f, domain=domain, norm="2")
    climb = ls.attack.Climb(steps=2, restarts=1)
    yield "attack.Climb", ls.attack.Climb, given(steps=2, restarts=1, seed=0)
    yield "attack.ascend", ls.attack.ascend, given(f=f, domain=ls.Ball(R=1.0, n=2), climb=climb)
    yield "attack.explicit_inputs", ls.attack.explicit_inputs, given(f=f, ball=ls.Ball(1.0, 4))
    yield (
        "attack.singular_response",
        ls.attack.singular_response,
        given(f=f, X=X, etas=(1e-3, 0.1), seed=0),
    )
    mu = ls.mean_field.DiscreteMeasure(X, torch.full((4,), 0.25, dtype=double))
    yield (
        "DiscreteMeasure",
        ls.mean_field.DiscreteMeasure,
        given(points=X, weights=mu.weights, positions=None),
    )
    yield "wasserstein", ls.mean_field.wasserstein, given(mu=mu, nu=mu, p=2)
    yield "push", ls.mean_field.push, given(f=f, mu=mu)
    yield "splitting", ls.mean_field.splitting, given(f=f, mu=mu, tol=1e-3, gap=None, solver=None)
    yield "two_diracs", ls.mean_field.two_diracs, given(f=f, R=1.0, family=None)
    yield "transition", ls.mean_field.transition, given(f=f, R=1.0, n_max=100.0, per_decade=2)
    gain = given(f=f, n=3, R=1.0, equal=True, tries=5, seed=0)
    yield "largest_gain", ls.mean_field.largest_gain, gain
    yield "flow", ls.dynamics.flow, given(f=f, X=X, time=0.1, frames=3, tol=1e-3, max_steps=100)
    yield "layered", ls.dynamics.layered, given(f=f, X=X, time=0.1, layers=2)
    yield "simulate", ls.simulate, given(preset="gaussian", n=2, dim=1, time=0.1, seed=0)
    for layer in (ls.nn.L2SelfAttention, ls.nn.DotSelfAttention, ls.nn.CosineSelfAttention):
        yield layer.__name__, layer, given(dim=4, heads=2, causal=False)
    yield (
        "ContractiveL2Attention",
        ls.nn.ContractiveL2Attention,
        given(dim=4, heads=2, constant=0.9, norm="2", causal=False),
    )
    yield "ContractiveMLP", ls.nn.ContractiveMLP, given(dim=4, hidden=4, constant=0.9)
    contraction = ls.nn.ContractiveMLP(4, 4, 0.5)
    yield "InvertibleResidual", ls.nn.InvertibleResidual, given(g=contraction, constant=None)
    yield "jasmin", ls.nn.jasmin, given(P=torch.full((4, 4), 0.25), k=0)
    yield "measured_sigma", ls.nn.measured_sigma, given(f=f, X=X, tol=1e-2)
    head = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    monitor = given(model=head, layers=None, every=2, csv=None, log=None, max_sigma=9.0, tol=0.1)
    yield "SmoothnessMonitor", ls.SmoothnessMonitor, monitor | given(stop=False, alarm=None)
    model = ls.load(str(place / "tiny"))
    yield (
        "load",
        ls.load,
        given(
            source=str(place / "tiny"), tokenizer=None, dtype="float64", device="cpu", random_init=0
        ),
    )
    one = given(text=PROSE, lengths=[3], samples=1, layers=[0], heads=[0])
    yield "measure", ls.measure, one | given(
        model=model, scopes=["attention"], tol=1e-2, gap=None, seed=0, workers=1, out=None,
        special_tokens=False,
    )  # fmt: skip
    yield "audit_model", ls.audit_model, one | given(model=model, radius=1.0, seed=0, climb=climb)
    yield "watch", ls.watch, given(model=model.trunk, layers=[0], scope="attention")
    yield (
        "write_report",
        ls.write_report,
        given(study=ls.measure(model, scopes=["attention"], **one), path=str(place / "page.html")),
    )
    yield "Study.open", ls.Study.open, given(directory=str(place / "nothing"))
    yield "train_character_model", train_character_model, given(
        text=PROSE, out=str(place / "model"), depth=1, width=4, heads=1, context=4, steps=1,
        batch=1, lr=1e-3, warmup=0, weight_decay=0.0, clip=1.0, seed=0, every=1, norm="pre",
        attention="dot", device="cpu",
    )  # fmt: skip


def given(**arguments: Any) -> dict[str, Any]:
    return arguments


def solved(f: Any, X: Any, **options: Any) -> Any:
    return ls.local_lipschitz(f, X, solver=ls.Solver(**options))


class TooSlowError(BaseException):
    """Not an Exception: no handler below may take it for one of its own."""


def too_slow(number: int, frame: object) -> None:
    raise TooSlowError


def fault(function: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """Describe a call that ends badly; return None for a result or a UserError."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            function(**arguments)
    except ls.UserError as error:
        words = str(error)
        return None if words.strip() and len(words) < 1000 else f"a message of {len(words)} letters"
    except TooSlowError:
        return f"no answer within {LIMIT} s"
    except BaseException:
        return traceback.format_exc(limit=-2)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def main(count: int, seed: int) -> int:
    draw, tally, began = random.Random(seed), Counter[str](), time.monotonic()
    logging.set_verbosity_error()
    signal.signal(signal.SIGPROF, too_slow)
    limit = 14 * 2**30  # memory taken without a check shows as an error, not as a killed process
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        save_tiny(place / "tiny", layers=1)
        known = list(calls(place))
        for name, function, arguments in known if "--check" in sys.argv else ():
            print(name, fault(function, arguments) or "works")
        for i in range(count):
            name, function, arguments = known[i % len(known)]
            spoiled = {
                key: draw.choice(VALUES)
                for key in draw.sample(list(arguments), min(len(arguments), draw.choice([1, 1, 2])))
            }
            found = fault(function, arguments | spoiled)
            tally["fault" if found else "result or UserError"] += 1
            if found:
                faults += 1
                words = {key: describe(value) for key, value in spoiled.items()}
                print(f"{name}{words}: {found}", flush=True)
    print(f"{count} bad calls of {len(known)} functions: {dict(tally)}")
    print(f"{faults} faults, {time.monotonic() - began:.0f} s")
    return 1 if faults else 0


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype} {value.device}"
    if inspect.isroutine(value) or isinstance(value, Odd):
        return type(value).__name__
    return "10**5000" if isinstance(value, int) and value > 10**100 else repr(value)[:60]


if __name__ == "__main__":
    numbers = [word for word in sys.argv[1:] if word.isdecimal()]
    sys.exit(main(*(int(word) for word in (*numbers, *("1000", "0")[len(numbers) :]))))
