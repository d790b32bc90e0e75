"""The monitor: training does not change by one bit; alarms, files, memory and errors."""

import csv
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.nn.l2_attention import L2SelfAttention
from lipscope.train.monitor import HEADER, RESTART_EVERY, SmoothnessMonitor, SmoothnessWarning
from lipscope.train.watched_modules import ModuleWatch
from tests.train.watched import DIM, HEADS, TOKENS, Small, batches, unchecked


def train(steps=5, watch=None, autocast=False, accumulate=1, dtype=torch.float32):
    """Losses, model and random state after some steps of training, with a monitor or without."""
    torch.manual_seed(0)
    model = Small().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = None if watch is None else watch(model)
    losses = []
    for i, X in enumerate(batches(steps * accumulate, dtype=dtype)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = (model(X) - X).square().mean() / accumulate
        loss.backward()
        losses.append(loss.item())
        if (i + 1) % accumulate == 0:
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            if monitor is not None:
                monitor.step()
            for p, g in zip(model.parameters(), grads, strict=True):
                assert (p.grad is None) == (g is None) and (g is None or torch.equal(p.grad, g))
            optimizer.zero_grad()
    return losses, model, torch.get_rng_state(), monitor


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"autocast": True},
        {"accumulate": 2},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
    ],
    ids=["plain", "autocast", "accumulation", "bfloat16", "float64"],
)
def test_training_is_bit_identical(setting, tmp_path):
    layers = ["dot", "l2", "cosine", "encoder", "encoder.self_attn"]
    losses, model, random, _ = train(**setting)
    seen, watched, random_too, monitor = train(
        watch=lambda m: SmoothnessMonitor(m, layers, every=2, csv=tmp_path / "sigma.csv"), **setting
    )
    assert seen == losses
    assert torch.equal(random, random_too)
    state, state_too = model.state_dict(), watched.state_dict()
    assert all(torch.equal(state[name], state_too[name]) for name in state)
    assert all(m.training for m in watched.modules())
    assert [r.layer for r in monitor.readings] == layers * 3
    assert all(r.sigma > 0 and r.status in ("converged", "resolution") for r in monitor.readings)


def test_the_hooks_exist_on_measured_steps_only_and_go_with_close():
    torch.manual_seed(0)
    model = Small()
    monitor = SmoothnessMonitor(model, every=3)

    def hooked():
        return sum(len(m._forward_pre_hooks) for m in model.modules())

    counts = []
    for X in batches(6):
        counts.append(hooked())
        model(X)
        monitor.step()
    assert counts == [4, 0, 0, 4, 0, 0]
    assert hooked() == 4
    monitor.close()
    assert hooked() == 0
    monitor.before(7)
    assert hooked() == 0
    monitor.before(9)
    assert hooked() == 4
    model(batches(1)[0])
    assert len(monitor.step(9)) == 4
    assert hooked() == 0


class Diagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(TOKENS, DIM))

    def forward(self, X):
        return X * self.scale


def test_a_singular_value_that_overtakes_the_remembered_one_is_found_in_time():
    model = Diagonal()
    monitor = SmoothnessMonitor(model, [model], every=1)
    with torch.no_grad():
        model.scale.copy_(torch.rand(TOKENS, DIM, generator=torch.Generator().manual_seed(0)))
        model.scale[0, 3] = 1.5
    found = []
    for step in range(RESTART_EVERY + 1):
        model(batches(1)[0])
        found.append(monitor.step()[0].sigma)
        if step == 0:
            # The worst memory: exactly the vector that is overtaken next.
            old = torch.zeros(TOKENS, DIM)
            old[0, 3] = 1.0
            monitor._remembered["Diagonal"] = 1, old
            with torch.no_grad():
                model.scale[1, 3] = 1.7
    assert found[0] == pytest.approx(1.5, rel=1e-3) and found[-1] == pytest.approx(1.7, rel=1e-3)
    assert all(sigma <= 1.7 * (1 + 1e-6) for sigma in found)


def test_a_remembered_vector_saves_products():
    torch.manual_seed(4)
    model = DotSelfAttention(32, 4, causal=True)
    X = torch.randn(2, 40, 32)
    monitor = SmoothnessMonitor(model, every=1, tol=1e-4)
    first, *others = [(model(X), monitor.step()[0])[1] for _ in range(4)]
    assert all(2 * other.products <= first.products for other in others)
    truth = ls.local_lipschitz(model.as_map(40), X[0], precision="exact")
    assert first.sigma == pytest.approx(truth.value, rel=1e-5) and others[
        -1
    ].sigma <= truth.upper * (1 + 1e-6)


class Turned(nn.Module):
    """X -> X W, where W = U diag(s) U' and U turns by `angle` before every step."""

    def __init__(self, angle: float):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        A = torch.randn(DIM, DIM, generator=g, dtype=torch.float64)
        self.turn = torch.matrix_exp(angle * (A - A.T) / torch.linalg.matrix_norm(A - A.T, 2))
        self.U = torch.linalg.qr(A)[0]
        self.s = torch.linspace(1.0, 2.0, DIM, dtype=torch.float64)

    def forward(self, X):
        self.U = self.U @ self.turn
        return X @ ((self.U * self.s) @ self.U.T)


def test_the_start_of_a_solve_is_the_vector_of_the_solve_before_it():
    """Weights that keep turning: an older vector would be a worse start at each step."""
    model = Turned(0.1)
    monitor = SmoothnessMonitor(model, [model], every=1, tol=1e-2)
    readings = []
    for X in batches(RESTART_EVERY, dtype=torch.float64):
        model(X)
        readings += monitor.step()
    assert [reading.sigma for reading in readings] == pytest.approx([2.0] * len(readings), rel=1e-2)
    products = [reading.products for reading in readings]
    assert products[-1] <= products[1] < products[0]


def test_the_alarm_warns_calls_or_stops():
    model = DotSelfAttention(DIM, HEADS)
    X = batches(1)[0]

    def run(**options):
        monitor = SmoothnessMonitor(model, every=1, **options)
        model(X)
        monitor.step()
        return monitor

    sigma = run().readings[0].sigma
    assert not run(max_sigma=1.01 * sigma, stop=True).stopped
    with pytest.warns(SmoothnessWarning, match=r"step 0: layer DotSelfAttention has sigma"):
        assert not run(max_sigma=0.99 * sigma).stopped
    called = []
    assert run(max_sigma=0.99 * sigma, alarm=called.append, stop=True).stopped
    assert [r.sigma for r in called] == [sigma]


def test_a_training_that_diverges_is_not_ended_by_its_monitor(tmp_path):
    model = nn.Sequential(DotSelfAttention(DIM, HEADS), L2SelfAttention(DIM, HEADS))
    called = []
    monitor = SmoothnessMonitor(
        model, every=1, max_sigma=1e9, alarm=called.append, csv=tmp_path / "s.csv"
    )
    model(torch.full((1, TOKENS, DIM), math.inf))
    assert [math.isnan(r.sigma) for r in monitor.step()] == [True, True]
    with torch.no_grad():
        model[0].query.weight.fill_(math.nan)
    model(batches(1)[0])
    assert all(math.isnan(r.sigma) for r in monitor.step())
    assert len(called) == 4
    with open(tmp_path / "s.csv") as file:
        assert [row["sigma"] for row in csv.DictReader(file)] == ["nan"] * 4


def test_a_layer_that_counts_its_calls_does_not_count_those_of_the_monitor():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(DIM))
            self.map = nn.Linear(DIM, DIM)

        def forward(self, X):
            self.calls += 1
            self.mean += X.detach().flatten(0, -2).mean(dim=0)
            return self.map(X)

    model = Counting()
    monitor = SmoothnessMonitor(model, [model], every=1)
    for X in batches(3):
        model(X)
        assert monitor.step()[0].sigma == pytest.approx(
            torch.linalg.matrix_norm(model.map.weight, 2).item(), rel=1e-3
        )
    assert model.calls == 3
    assert torch.allclose(model.mean, sum(X.flatten(0, 1).mean(dim=0) for X in batches(3)))


def test_gradient_checkpointing_does_not_disturb_it():
    class Thrifty(Small):
        def forward(self, X, padding=None):
            return torch.utils.checkpoint.checkpoint(super().forward, X, use_reentrant=False)

    def run(watched):
        torch.manual_seed(0)
        model = Thrifty()
        monitor = SmoothnessMonitor(model, ["l2", "cosine"], every=1) if watched else None
        losses = []
        for X in batches(3):
            loss = model(X).square().mean()
            loss.backward()
            losses.append((loss.item(), model.l2.query.weight.grad.clone()))
            if monitor is not None:
                assert all(r.sigma > 0 for r in monitor.step())
        return losses

    for (loss, grad), (loss_too, grad_too) in zip(run(False), run(True), strict=True):
        assert loss == loss_too and torch.equal(grad, grad_too)


def test_readings_reach_the_log_and_the_file(tmp_path):
    logged = []
    path = tmp_path / "sigma.csv"
    _, _, _, monitor = train(
        steps=5,
        watch=lambda m: SmoothnessMonitor(
            m, ["l2"], every=2, csv=path, log=lambda *a: logged.append(a)
        ),
    )
    assert logged == [({"sigma/l2": r.sigma}, r.step) for r in monitor.readings]
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [(int(r["step"]), r["layer"], float(r["sigma"])) for r in rows] == [
        (r.step, "l2", r.sigma) for r in monitor.readings
    ]
    assert list(rows[0]) == HEADER


@pytest.mark.filterwarnings("error")
def test_a_log_that_fails_is_told_once_and_the_training_goes_on():
    model, X = DotSelfAttention(DIM, HEADS), batches(1)[0]
    asked = []

    def log(values, step):
        asked.append(step)
        raise ConnectionError("the tracker\nis gone")

    monitor = SmoothnessMonitor(model, every=2, log=log)
    with pytest.warns(SmoothnessWarning) as caught:
        for _ in range(5):
            model(X)
            monitor.step()
    assert [str(w.message) for w in caught] == [
        "step 0: no readings in the log: ConnectionError, the tracker is gone"
    ]
    assert asked == [0, 2, 4] == [reading.step for reading in monitor.readings]


@pytest.mark.parametrize("place", ["log", "alarm"])
def test_an_interrupt_passes_and_leaves_neither_hooks_nor_tokens(place):
    model = DotSelfAttention(DIM, HEADS)

    def interrupted(*readings):
        raise KeyboardInterrupt

    monitor = SmoothnessMonitor(model, every=1, max_sigma=1e-9, **{place: interrupted})
    model(batches(1)[0])
    with pytest.raises(KeyboardInterrupt):
        monitor.step()
    assert not model._forward_pre_hooks
    assert [tap.found for tap in monitor.watch._taps.values()] == [None]


def test_what_is_wrong_is_said(tmp_path):
    model = nn.Sequential(DotSelfAttention(DIM, HEADS))
    strange = tmp_path / "strange.csv"
    strange.write_text("a,b\n1,2\n")
    for arguments, message in [
        ({"every": 0}, "every must be"),
        ({"max_sigma": -1.0}, "max_sigma must be"),
        ({"max_sigma": math.nan}, "max_sigma must be"),
        ({"max_sigma": "a"}, "max_sigma must be"),
        ({"max_sigma": True}, "max_sigma must be"),
        ({"tol": 0.0}, "tol must lie"),
        ({"tol": "1"}, "tol must lie"),
        ({"layers": []}, "layers is empty"),
        ({"layers": "0"}, r"must be a list of layers, as in layers=\['0'\], got str"),
        ({"layers": model[0]}, r"must be a list of layers, as in layers=\[...\], got DotSelf"),
        ({"layers": [0]}, "must be names or modules, got 0"),
        ({"layers": ["0.quary"]}, "did you mean '0.query'"),
        ({"layers": [nn.Linear(2, 2)]}, "has no layer this Linear"),
        ({"csv": tmp_path / "no" / "file.csv"}, "does not exist"),
        ({"csv": tmp_path}, "is a folder"),
        ({"csv": strange}, "was not written by a SmoothnessMonitor"),
    ]:
        with unchecked(), pytest.raises(ls.UserError, match=message):
            SmoothnessMonitor(model, **arguments)
    assert strange.read_text() == "a,b\n1,2\n"
    with pytest.raises(ls.UserError, match="no attention that is recognised"):
        SmoothnessMonitor(nn.Linear(2, 2))
    with pytest.raises(ls.UserError, match="already has its layers"):
        SmoothnessMonitor(ModuleWatch(model), ["0"])
    with (
        unchecked(),
        pytest.raises(ls.UserError, match="takes a torch module or a watch of one, got NoneType"),
    ):
        SmoothnessMonitor(None)
    monitor = SmoothnessMonitor(model, every=1)
    for number in (1.5, -1, True, "1"):
        for told in (monitor.step, monitor.before):
            with (
                unchecked(),
                pytest.raises(ls.UserError, match="the number of a step must be a whole number"),
            ):
                told(number)
    model(batches(1)[0])
    assert [reading.step for reading in monitor.step()] == [0]
