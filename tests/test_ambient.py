"""Every public function gives the same bits whatever the caller has set in torch.

`python -m tests.test_ambient` runs the same matrix without pytest, on a GPU where there is one, and
prints how each call ended; names of states select some of them.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import math
import re
import sys
import tempfile
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

try:
    import pytest
except ImportError:  # the machine with a GPU runs main() without it
    pytest = unittest.mock.MagicMock()
    pytest.mark.parametrize.return_value = pytest.mark.gpu = lambda test: test
from transformers import LlamaConfig, LlamaModel

import lipscope as ls
from lipscope.attack.tokens import (
    Swapped,
    TextTarget,
    duplicated_tokens,
    guided_swaps,
    projected_swaps,
    random_swaps,
)
from lipscope.theorems.composition import Affine, Chain, Residual
from tests.other_device import ELSEWHERE, other_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where tensors and modules live; inputs of a model's texts stay on the CPU."""

IDS = [[(7 * i * i + 3 * i + 1) % 37 for i in range(24)]]


def things(device: str = DEVICE) -> SimpleNamespace:
    """Arguments of the calls below, with the same bits wherever and however they are made."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        x = torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu")
        return x.to(device, dtype)

    def weighed(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(0.3 * randn(*p.shape))
        return module

    with torch.device("cpu"), _default_dtype(torch.float32):
        layers = {
            "linear": nn.Linear(4, 4),
            "plain": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
            "half": nn.Linear(4, 4, dtype=torch.bfloat16),
            "torch_attention": nn.MultiheadAttention(8, 2, batch_first=True).eval(),
            "encoder": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
            "dot": ls.nn.DotSelfAttention(8, 2),
            "l2": ls.nn.L2SelfAttention(8, 2),
            "ball": ls.nn.BallL2Attention(8, 2),
            "cosine": ls.nn.CosineSelfAttention(8, 2),
            "contractive": ls.nn.ContractiveL2Attention(8, 2, constant=0.5),
            "mlp": ls.nn.ContractiveMLP(8, 16, constant=0.5),
            "llama": LlamaModel(
                LlamaConfig(
                    vocab_size=37,
                    hidden_size=16,
                    intermediate_size=24,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                )
            ),
        }
        layers = {name: weighed(layer).to(device) for name, layer in layers.items()}
        port = LlamaModel(layers["llama"].config).to(device)
        port.load_state_dict(layers["llama"].state_dict())
    A, V = randn(3, 3), randn(3, 3)
    eye, one = (torch.eye(size, dtype=torch.float64, device=device) for size in (3, 1))
    X = randn(6, 3)
    weights = torch.softmax(randn(6), dim=0)
    return SimpleNamespace(
        **layers,
        port=port.bfloat16(),
        device=device,
        f=ls.SelfAttention(A, eye, V),
        factored=ls.theorems.FactoredAttention(A, A, 3 * A, kernel=ls.L2(), M=3 * eye[None]),
        line=ls.SelfAttention(-one, one, one),
        one=one,
        X=X,
        X4=randn(5, 4, dtype=torch.float32),
        X8=randn(2, 5, 8, dtype=torch.float32),
        E=randn(6, 3),
        q=randn(2, 5, 4, dtype=torch.float32),
        mu=ls.mean_field.DiscreteMeasure(X, weights),
        mu32=ls.mean_field.DiscreteMeasure(X.float(), weights.float()),
        nu=ls.mean_field.DiscreteMeasure(X + randn(6, 3), weights),
        ids=torch.tensor(IDS, device="cpu"),
        matrix=randn(3, 3),
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _plain() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), ExitStack() as stack:
        for kind in {DEVICE, "cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _rows(study: ls.Study) -> object:
    return [row._replace(seconds=0.0) if hasattr(row, "seconds") else row for row in study.rows]


def _monitor(t: SimpleNamespace) -> object:
    found = []
    for watched in (t.encoder, ls.watch(t.llama)):
        monitor = ls.SmoothnessMonitor(watched, every=1)
        try:
            with _plain():  # the training step; the measurement happens in the caller's state
                t.encoder(t.X8) if watched is t.encoder else t.llama(t.ids.to(t.device))
            found += monitor.step()
        finally:
            monitor.close()
    return found


def _measured(t: SimpleNamespace, **more: Any) -> ls.Study:
    return ls.measure(t.llama, t.ids[0], lengths=[6], samples=1, layers=[0], **more)


def _study(t: SimpleNamespace) -> object:
    study = _measured(t)
    with tempfile.TemporaryDirectory() as folder:
        page = ls.write_report(study, Path(folder) / "page.html").stat().st_size
    return study.growth, study.peak, study.joint_confidence, _rows(ls.merge([study])), page > 9999


def _load(t: SimpleNamespace) -> object:
    model = ls.load(t.llama, random_init=1)
    sites = model.sites(t.ids[0, :6], scopes=["heads", "attention", "block"])
    return (
        model.card.weights,
        model.preflight.difference,
        [(site.X, site.radius.tolist(), site.value()) for site in sites],
        [ls.local_lipschitz(site.f, site.X[0], tol=1e-3) for site in sites[1:]],
    )


def _jacobian(t: SimpleNamespace) -> object:
    closed, plain = ls.jacobian(t.f, t.X), ls.jacobian(t.plain, t.X4)
    both = plain @ plain + 2.0 * plain
    field = ls.mean_field.derivative(t.f.to(torch.float32), t.mu32)
    return (
        [closed.mv(t.E), closed.rmv(t.E), closed.to_dense(), plain.mv(t.X4), plain.T.to_dense()],
        [field.mv(t.E.float()), t.f.to(torch.float32).jacobian(t.X.float()).mv(t.E.float())],
        both.to_dense(),
        ls.spectral_norm(both).upper,
    )


def _operator(t: SimpleNamespace) -> object:
    J = ls.LinearOperator(
        lambda x: t.matrix @ x,
        lambda u: t.matrix.T @ u,
        in_shape=(3,),
        out_shape=(3,),
        device=t.matrix.device,
    )
    start = torch.ones(3, dtype=torch.float64, device="cpu")
    return (J @ J + J).to_dense(), ls.spectral_norm(J), ls.spectral_norm(J, start=start)


def _layer(name: str, n: int = 5) -> Callable[[SimpleNamespace], object]:
    def call(t: SimpleNamespace) -> object:
        layer = getattr(t, name)
        bounds = [getattr(layer, "constant", None)]
        if isinstance(layer, ls.nn.AttentionLayer):
            bounds.append(layer.lipschitz_bound(n))
            with contextlib.suppress(ls.UserError):  # some have no closed form
                bounds.append(layer.as_map(n))
        return bounds

    return call


def _residual(t: SimpleNamespace) -> object:
    layer = ls.nn.InvertibleResidual(t.mlp)
    torch.manual_seed(0)
    return layer.inverse(t.X8), layer.log_det(t.X8, probes=2), layer.constant


def _parametrised(change: Callable[..., nn.Module]) -> Callable[[SimpleNamespace], object]:
    def call(t: SimpleNamespace) -> object:
        with _plain() if t is arguments() else contextlib.nullcontext():
            layer = copy.deepcopy(t.linear)
        change(layer)
        with _plain():
            return layer.weight

    return call


_sigma_reparametrised = _parametrised(ls.nn.sigma_reparametrise)


def _converted(t: SimpleNamespace) -> object:
    inputs = t.ids[:1, :6]
    with torch.inference_mode(False):  # weights that can be trained
        models = [copy.deepcopy(t.llama) for _ in range(2)]
    found = ls.convert_model(models[0], "l2", inputs)
    torch.manual_seed(0)
    fresh = ls.convert_model(models[1], "cosine", inputs, fresh=True)
    return [(list(one.model.state_dict().items()), one.layers) for one in (found, fresh)]


def _flow(t: SimpleNamespace, **rules: Any) -> Any:
    return ls.dynamics.flow(dataclasses.replace(t.f, **rules), t.X, time=0.5, frames=5)


def _attacked(t: SimpleNamespace) -> object:
    study, lines = ls.attack_model(t.llama, t.ids[0], ls.AttackPlan("direction", length=6))
    return _rows(study), lines


def _budget(t: SimpleNamespace) -> object:
    budget = ls.error_budget(
        t.llama, t.ids, formats="bf16,int8,kv4", observe=True, samples=1, worst=True
    )
    return budget


def _regularised(t: SimpleNamespace) -> object:
    return [
        ls.nn.measured_sigma(t.plain, t.X4).detach(),
        ls.nn.measured_sigma(t.half, t.X4.bfloat16()).detach(),
        ls.nn.measured_sigma(t.contractive, t.X8).detach(),
    ]


def _attend(t: SimpleNamespace) -> object:
    q = t.q
    sums = [ls.attend(q, q, q, causal=True), ls.attend(q, q, q, scale=0.3)]
    sums.append(ls.scaled_dot_product_attention(q[None], q[None], q[None], is_causal=True))
    return sums


def _everywhere(t: SimpleNamespace) -> object:
    with ls.attend_everywhere():
        return nn.functional.scaled_dot_product_attention(t.q[None], t.q[None], t.q[None])


CALLS: dict[str, Callable[[SimpleNamespace], object]] = {
    "LinearOperator": _operator,
    "Model": _load,
    "Normed": lambda t: ls.attack.ascend(
        t.f,
        ls.Normed(torch.ones_like(t.X[0]), n=4),
        ls.attack.Climb(steps=2, restarts=1),
    ),
    "SelfAttention": lambda t: (t.f(t.X), t.f.jacobian(t.X).to_dense(), t.f.double()(t.X)),
    "SmoothnessMonitor": _monitor,
    "Study": _study,
    "attack.ascend": lambda t: [
        ls.attack.ascend(f, ls.Ball(R=2.0, n=4), ls.attack.Climb(steps=3, restarts=2), dim=8)
        for f in (t.f, copy.deepcopy(t.mlp).double())
    ],
    "attack.explicit_inputs": lambda t: ls.attack.explicit_inputs(t.f, ls.Ball(R=2.0, n=4)),
    "attack.singular_response": lambda t: ls.attack.singular_response(t.plain, t.X4),
    "attack_model": _attacked,
    "attend": _attend,
    "attend_everywhere": _everywhere,
    "audit_model": lambda t: (lambda found: (_rows(found[0]), found[1]))(
        ls.audit_model(t.llama, t.ids[0], [6], [0], [0], climb=ls.attack.Climb(steps=2, restarts=1))
    ),
    "bounds": lambda t: (
        [
            list(ls.bounds(f, domain))
            for domain in (ls.Ball(1.0, 6), ls.Everywhere(6), ls.Point(t.X), ls.Around(t.X, 0.1))
            for f in (t.f, dataclasses.replace(t.f, causal=True, window=2))
        ]
        + [list(ls.bounds(t.factored, ls.Ball(1.0, 4), norm="inf"))]
    ),
    "check_run": lambda t: ls.check_run(t.llama, t.port, t.ids, samples=1),
    "merge": _study,
    "convert_model": _converted,
    "dynamics.find_clusters": lambda t: ls.dynamics.find_clusters(_flow(t)),
    "dynamics.flow": lambda t: (_flow(t), _flow(t, causal=True)),
    "dynamics.gaussian_flow": lambda t: ls.dynamics.gaussian_flow(
        t.line, 0 * t.one[0], t.one, time=0.25, frames=5
    ),
    "dynamics.growth_along_depth": lambda t: ls.dynamics.growth_along_depth(
        t.f, t.X, time=0.5, layers=3, points=3
    ),
    "dynamics.layered": lambda t: ls.dynamics.layered(t.f, t.X, time=0.5, layers=3),
    "error_budget": _budget,
    "jacobian": _jacobian,
    "load": _load,
    "local_lipschitz": lambda t: [
        ls.local_lipschitz(t.f, t.X),
        ls.local_lipschitz(t.f, t.mu),
        ls.local_lipschitz(t.plain, t.X4),
        ls.local_lipschitz(t.plain, t.X4, norm="inf"),
        ls.local_lipschitz(t.f.to(torch.float32), t.X.float()),
        ls.local_lipschitz(t.dot.as_map(5), t.X8, precision="exact"),
        ls.local_lipschitz(lambda X: X @ t.matrix + X.sin(), t.X),
    ],
    "mean_field.DiscreteMeasure": lambda t: (t.mu.radius, t.mu.split(2), t.mu.merged()),
    "mean_field.conditional_distance": lambda t: ls.mean_field.conditional_distance(
        *(ls.mean_field.DiscreteMeasure.uniform(m.points, causal=True) for m in (t.mu, t.nu))
    ),
    "mean_field.derivative": lambda t: ls.mean_field.derivative(t.f, t.mu).to_dense(),
    "mean_field.largest_gain": lambda t: ls.mean_field.largest_gain(t.line, 2, 2.0, tries=20),
    "mean_field.push": lambda t: ls.mean_field.push(t.f, t.mu),
    "mean_field.splitting": lambda t: ls.mean_field.splitting(t.f, t.mu),
    "mean_field.splitting_map": lambda t: ls.mean_field.splitting_map(
        t.line, torch.tensor([0.0, 1.0, 4.0], dtype=torch.float32, device=t.device)
    ),
    "mean_field.transition": lambda t: ls.mean_field.transition(t.line, R=1.0, n_max=20),
    "mean_field.two_diracs": lambda t: ls.mean_field.two_diracs(t.line, R=2.0),
    "mean_field.wasserstein": lambda t: ls.mean_field.wasserstein(t.mu, t.nu),
    "measure": lambda t: _rows(_measured(t, scopes=["heads", "attention", "block", "model"])),
    "nn.BallL2Attention": _layer("ball"),
    "nn.ContractiveL2Attention": _layer("contractive"),
    "nn.ContractiveMLP": _layer("mlp"),
    "nn.CosineSelfAttention": _layer("cosine"),
    "nn.DotSelfAttention": _layer("dot"),
    "nn.InvertibleResidual": _residual,
    "nn.L2SelfAttention": _layer("l2"),
    "nn.SigmaReparam": _sigma_reparametrised,
    "nn.jasmin": lambda t: ls.nn.jasmin(t.X8.softmax(dim=-1), k=2),
    "nn.measured_sigma": _regularised,
    "nn.sigma_reparametrise": _sigma_reparametrised,
    "nn.spectrally_normalise": _parametrised(ls.nn.spectrally_normalise),
    "write_report": _study,
    "reproduce_papers": lambda t: [
        (one.claim.id, one.word) for one in ls.reproduce_papers(only=["S3"], quick=True)
    ],
    "scaled_dot_product_attention": _attend,
    "simulate": lambda t: ls.simulate("clusters", n=6, time=0.5, device=t.device).flow,
    "singular_triplets": lambda t: ls.singular_triplets(ls.jacobian(t.f, t.X), 3),
    "spectral_norm": _operator,
    "theorems.FactoredAttention": lambda t: list(ls.bounds(t.factored, ls.Everywhere(4))),
    "theorems.network_bound": lambda t: ls.theorems.network_bound(
        Chain((Affine(t.matrix), Residual(Affine(0.5 * t.matrix)))), ls.Ball(R=1.0, n=8)
    ),
    "watch": _monitor,
}

EXEMPT = {
    "no computation": {
        *("Around", "AttackPlan", "Ball", "BatchEstimate", "Dot", "Estimate", "Everywhere", "L2"),
        *("Point", "Rope", "SmoothnessWarning", "Solver", "Status", "UserError"),
        *("attack.Climb", "attack.Found", "nn.ATTENTIONS", "nn.AttentionLayer", "nn.Inverse"),
        *("nn.LogDet", "nn.unwrapped", "theorems.Bound", "theorems.BoundRow"),
        *("theorems.BoundRows", "theorems.REGISTRY"),
    },
    "the table has it under another name": {"dynamics.simulate", "theorems.bounds"},
    "they call a monitor's step from a trainer": {"lightning_callback", "trainer_callback"},
}
"""Public names that have no row of their own, and why."""

PACKAGES = ("attack", "dynamics", "mean_field", "nn", "theorems")


def public_names() -> set[str]:
    names = set(dir(ls)) - set(PACKAGES)
    return names | {f"{p}.{name}" for p in PACKAGES for name in dir(getattr(ls, p))}


@contextmanager
def _set(setter: Callable[[Any], object], value: Any, back: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


STATES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "default float64": lambda: _default_dtype(torch.float64),
    "default bfloat16": lambda: _default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "autocast cpu": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: _set(
        lambda on: torch.use_deterministic_algorithms(on, warn_only=DEVICE == "cuda"), True, False
    ),
    "default device cuda": lambda: torch.device("cuda"),
    "default device meta": lambda: torch.device("meta"),
    "forward AD": torch.autograd.forward_ad.dual_level,
    "flushed denormals": lambda: _set(torch.set_flush_denormal, True, False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}
"""What a caller may have set."""

REFUSED = {
    "inference_mode, arguments made inside": {
        *("SmoothnessMonitor", "local_lipschitz", "nn.SigmaReparam", "nn.measured_sigma"),
        *("nn.sigma_reparametrise", "nn.spectrally_normalise", "watch"),
    },
    "default float64": {"reproduce_papers"},
    "default bfloat16": {"reproduce_papers"},
    "forward AD": {"local_lipschitz"},
}
"""Calls that end in a UserError: what they need cannot be had in this state."""

NOT_COMPARED = {
    # A monitor never interrupts its training: it reports an error as a status.
    "forward AD": {"SmoothnessMonitor", "watch"},
    # Like torch's own attention, these follow autocast.
    "autocast": {"attend", "attend_everywhere", "scaled_dot_product_attention"},
    "autocast cpu": {"attend", "attend_everywhere", "scaled_dot_product_attention"},
}


def bits(x: Any, depth: int = 0) -> Any:
    """A result as plain Python values, every float by its bits; times are left out."""
    if depth > 12:
        raise AssertionError(f"a result that does not end: {type(x)}")
    if isinstance(x, Tensor):
        x = x.detach().cpu().resolve_conj()
        return (
            str(x.dtype),
            tuple(x.shape),
            x.contiguous().view(torch.uint8).flatten().tolist()
            if x.numel() and x.ndim
            else repr(x.item())
            if x.numel()
            else "",
        )
    if isinstance(x, float):
        return "nan" if math.isnan(x) else x.hex()
    if x is None or isinstance(x, str | int | bool | bytes | Path | torch.dtype | torch.device):
        return str(x)
    if dataclasses.is_dataclass(x):
        return {
            f.name: bits(getattr(x, f.name), depth + 1)
            for f in dataclasses.fields(x)
            if f.name not in ("seconds", "versions") and not callable(getattr(x, f.name))
        }
    if hasattr(x, "_asdict"):
        return bits(x._asdict(), depth + 1)
    if isinstance(x, Mapping):
        return {
            str(k): bits(v, depth + 1) for k, v in x.items() if k != "seconds" and not callable(v)
        }
    if isinstance(x, list | tuple | set | frozenset):
        return [bits(v, depth + 1) for v in x]
    return type(x).__name__


@cache
def arguments() -> SimpleNamespace:
    return things()


def called(name: str, given: SimpleNamespace) -> Any:
    """The result of a call, with a seed where the solver would draw a fresh one."""
    with unittest.mock.patch("secrets.randbits", return_value=2**40 + 7):
        return CALLS[name](given)


@cache
def plain(name: str) -> Any:
    return bits(called(name, arguments()))


DISTINCT = list({call: name for name, call in CALLS.items()}.values())
"""One name for each call."""

EQUAL, PLACED, AS_STATED = "equal", "on its device, not compared", "refused"
SKIPPED = "skipped: POT is not installed"
FINE = (EQUAL, PLACED, AS_STATED, SKIPPED)
"""How a call may end; everything else is a fault, and says what happened."""


def outcome(state: str, name: str, inside: bool = False) -> str:
    """How a call in a state ended; `inside` makes the arguments in the state, too."""
    refused = name in REFUSED.get(f"{state}, arguments made inside" if inside else state, ())
    before = _globals()
    try:
        expected = plain(name)
        with STATES[state]():
            result = called(name, things() if inside else arguments())
        found = _placed(result, arguments().X.device)
        found = found if bits(result) == expected else "another result"
        found = "not refused" if refused else found
    except Exception as error:
        found = _ending(error, refused)
    return found if _globals() == before else f"left behind: {before} -> {_globals()}"


def outcome_elsewhere(name: str) -> str:
    """How a call with arguments on another device ended, which is emulated."""
    with other_device() as refused:
        try:
            found = _placed(called(name, arguments_elsewhere()), ELSEWHERE)
        except Exception as error:
            found = _ending(error)
    if found != EQUAL:
        return found
    return f"swallowed: {refused[0]}" if refused else PLACED


def _placed(result: Any, device: torch.device) -> str:
    lost = misplaced(result, device)
    return f"not on {device}: {', '.join(lost)}" if lost else EQUAL


def _ending(error: Exception, refused: bool = False) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "ot":
        return SKIPPED
    if isinstance(error, ls.UserError) and refused:
        return AS_STATED
    return f"{type(error).__name__}: {error}".splitlines()[0]


def compare(state: str, names: list[str] | None = None, inside: bool = False) -> dict[str, str]:
    """What went wrong in a state, by name."""
    found = {
        name: outcome(state, name, inside)
        for name in names or DISTINCT
        if name not in NOT_COMPARED.get(state, ())
    }
    return {name: what for name, what in found.items() if what not in FINE}


ON_THE_CPU = {
    *("value", "lower", "upper", "residual", "steps"),  # of a BatchEstimate
    *("times", "sigma", "product", "gronwall", "local"),  # along depth, and of numbers of tokens
    *("centres", "masses", "labels", "radii", "formed", "counts"),  # of clusters
}
"""Numbers about a result; what can be added to the input lives where the input does."""


def misplaced(x: Any, device: torch.device, name: str = "a result") -> list[str]:
    """The parts of a result that are on another device than its input."""
    if isinstance(x, Tensor):
        return [] if x.device == device or name in ON_THE_CPU else [name]
    if dataclasses.is_dataclass(x):
        parts = [(field.name, getattr(x, field.name)) for field in dataclasses.fields(x)]
    elif isinstance(x, Mapping) or hasattr(x, "_asdict"):
        parts = [*(x if isinstance(x, Mapping) else x._asdict()).items()]
    else:
        parts = [(name, part) for part in x] if isinstance(x, list | tuple) else []
    return [lost for key, part in parts for lost in misplaced(part, device, str(key))]


@cache
def arguments_elsewhere() -> SimpleNamespace:
    return things(str(ELSEWHERE))


def _globals() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def main(states: list[str]) -> int:
    """Print how each call ended in each state; return the number of faults."""
    endings: dict[str, Callable[[str], str]] = {}
    for state in STATES:
        if "cuda" not in state or DEVICE == "cuda":
            endings[state] = partial(outcome, state)
    endings["inference_mode, arguments made inside"] = partial(
        outcome, "inference_mode", inside=True
    )
    endings["arguments elsewhere"] = outcome_elsewhere
    faults = calls = 0
    for state in states or endings:
        for name in DISTINCT:
            if name in NOT_COMPARED.get(state, ()):
                continue
            what = endings[state](name)
            calls += 1
            faults += what not in FINE
            mark = "" if what in FINE else "FAILED "
            print(f"{state}: {name}: {mark}{what[:300]}", flush=True)
    print(f"{calls} calls on {DEVICE}, {faults} failed")
    return faults


def test_every_public_name_has_a_row() -> None:
    known = set(CALLS) | set().union(*EXEMPT.values())
    assert known == public_names()


QUICK = ("inference_mode", "default float64", "autocast", "default device meta")
"""States with a fault before there were entry points; main() tries the others, too."""


@pytest.mark.wide
@pytest.mark.parametrize("state", QUICK)
def test_results_do_not_depend_on_the_state_of_the_caller(state: str) -> None:
    assert compare(state) == {}


SECONDS = (
    *("attack.ascend", "audit_model", "attack_model", "convert_model", "error_budget", "load"),
    *("dynamics.growth_along_depth", "mean_field.largest_gain", "measure", "reproduce_papers"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.wide if name in SECONDS else ()) for name in DISTINCT],
)
def test_arguments_may_live_on_any_device(name: str) -> None:
    assert outcome_elsewhere(name) in FINE


def test_token_searches_take_embeddings_on_any_device() -> None:
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def found(embedding: Tensor) -> list[Swapped]:
        target = TextTarget(
            measure=lambda ids: embedding[ids].sin().sum(dim=(1, 2)),
            slope=lambda E: (E.sin().sum().item(), E.cos()),
            embedding=embedding,
        )
        searches = (guided_swaps, duplicated_tokens, projected_swaps, random_swaps)
        return [search(target, [0, 1, 2, 3], 2) for search in searches]

    with other_device():
        elsewhere = found(rows.to(ELSEWHERE))
    assert elsewhere == found(rows)


def test_tensors_on_two_devices_are_refused_by_name() -> None:
    with other_device():
        t, there = arguments(), arguments_elsewhere()
        for call, message in {
            lambda: ls.SelfAttention(t.f.Q, t.f.K, there.f.V): "Q and V must be .* cpu and xpu:0",
            lambda: dataclasses.replace(t.f, mask=there.X @ there.X.T): "Q and mask must be",
            lambda: dataclasses.replace(there.factored, M=3 * t.f.K[None]): "Q and M must be",
            lambda: ls.mean_field.DiscreteMeasure(t.X, there.mu.weights): "points and weights",
            lambda: ls.local_lipschitz(there.f, t.X): "f and X .* xpu:0 and cpu",
            lambda: ls.bounds(t.f, ls.Point(there.X)): "f and X .* cpu and xpu:0",
            lambda: ls.mean_field.push(there.f, t.mu): "f and points must be",
        }.items():
            with pytest.raises(ls.UserError, match=message):
                call()


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["default device cuda", "autocast", "inference_mode"])
def test_results_on_a_gpu_do_not_depend_on_the_state_of_the_caller(state: str) -> None:
    assert compare(state) == {}


CHEAP = (
    "jacobian",
    "local_lipschitz",
    "nn.measured_sigma",
    "error_budget",
    "bounds",
    "attack.ascend",
)


@pytest.mark.wide
@pytest.mark.parametrize(
    "state", sorted(set(STATES) - set(QUICK) - {"plain", "default device cuda"})
)
def test_some_results_do_not_depend_on_rarer_states(state: str) -> None:
    assert compare(state, [*CHEAP]) == {}


@pytest.mark.wide
def test_arguments_made_in_inference_mode_are_copied_or_refused() -> None:
    names = [*CHEAP, "measure", "nn.InvertibleResidual", "mean_field.push", "watch", "Normed"]
    assert compare("inference_mode", names, inside=True) == {}


def test_inference_tensors_are_copied_outside_inference_mode_too() -> None:
    with torch.inference_mode():
        given = things()
    assert bits(called("jacobian", given)) == plain("jacobian")
    assert given.linear.weight.is_inference()  # the caller's own module is left as it was


def test_results_are_ordinary_tensors_without_a_graph() -> None:
    t = arguments()
    with torch.inference_mode():
        found = ls.local_lipschitz(t.plain, t.X4)
        sigma = ls.nn.measured_sigma(t.plain, t.X4)
    assert not found.left.is_inference() and not sigma.requires_grad
    with torch.no_grad():
        assert not ls.nn.measured_sigma(t.plain, t.X4).requires_grad
    assert ls.nn.measured_sigma(t.plain, t.X4).requires_grad


def test_a_map_sees_the_default_device_of_its_owner() -> None:
    t, seen = arguments(), []

    def f(X: Tensor) -> Tensor:
        seen.append(torch.get_default_device().type)
        return X.sin()

    with torch.device("meta"):
        assert bits(ls.local_lipschitz(f, t.X, tol=1e-9).value) == bits(
            ls.local_lipschitz(torch.sin, t.X, tol=1e-9).value
        )
        ls.nn.measured_sigma(f, t.X)
        ls.attack.singular_response(f, t.X)
    assert set(seen) == {"meta"}


def test_a_map_that_fails_on_the_default_device_says_so() -> None:
    with torch.device("meta"), pytest.raises(ls.UserError, match="default device meta"):
        ls.local_lipschitz(lambda X: X + torch.ones(6, 3), arguments().X)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_transforms_of_torch_are_refused_by_name(transform: Callable[..., Any]) -> None:
    t = arguments()
    with pytest.raises(ls.UserError, match=r"cannot run inside this transform of torch\.func"):
        transform(lambda X: X.sum() * ls.local_lipschitz(t.plain, X).value)(t.X4[None])


def test_weights_that_change_during_a_measurement_are_refused() -> None:
    W = torch.eye(3, dtype=torch.float64)
    J = ls.jacobian(lambda X: (X @ W).sin() @ W, torch.ones(2, 3, dtype=torch.float64))
    W.add_(1)  # as an optimizer in another thread would
    with pytest.raises(ls.UserError, match="changed in place"):
        ls.spectral_norm(J)


def test_layers_are_made_as_torch_makes_its_own() -> None:
    with _default_dtype(torch.float64), torch.device("meta"):
        for kind in (ls.nn.DotSelfAttention, ls.nn.CosineSelfAttention, ls.nn.L2SelfAttention):
            like = nn.Linear(2, 2).weight
            assert {(p.dtype, p.device) for p in kind(8, 2).parameters()} == {
                (like.dtype, like.device)
            }


CREATORS = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def _nameless(path: Path) -> Iterator[str]:
    """Calls whose result has the default dtype, outside the constructors of layers."""
    tree = ast.parse(path.read_text())
    if "papers" in path.parts:  # they need the usual default dtype, and say so
        return
    layers = path.parent.name == "nn"
    for part in ast.walk(tree):
        if layers and isinstance(part, ast.FunctionDef) and part.name == "__init__":
            part.body = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("torch."):
            continue
        name, given = ast.unparse(call.func)[6:], {keyword.arg for keyword in call.keywords}
        scalars = name == "where" and all(
            isinstance(x, ast.Constant) or re.fullmatch("-?[A-Z_]{2,}", ast.unparse(x))
            for x in call.args[1:]
        )
        if scalars or (name in CREATORS and "dtype" not in given):
            yield f"{path.name}:{call.lineno}: {ast.unparse(call)}"


def test_new_tensors_name_their_dtype() -> None:
    root = Path(ls.__file__).parent
    assert [line for path in sorted(root.rglob("*.py")) for line in _nameless(path)] == []


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(bool(main(sys.argv[1:])))
