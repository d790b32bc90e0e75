"""The monitor: its numbers are those of dense Jacobians, and the training beside it does not change by one bit."""

import copy
import csv
import io
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.nn.cosine_attention import CosineSelfAttention
from lipscope.nn.dot_attention import DotSelfAttention
from lipscope.nn.l2_attention import ContractiveL2Attention, L2SelfAttention
from lipscope.nn.monitor import ANEW, SmoothnessMonitor, SmoothnessWarning
from lipscope.nn.sigma_table import HEADER
from lipscope.nn.watching import ModuleWatch

DIM, HEADS, TOKENS = 8, 2, 6


class Small(nn.Module):
    """Attention of several kinds, dropout, batch statistics: everything a monitor could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.dot = DotSelfAttention(DIM, HEADS, causal=True)
        self.l2 = L2SelfAttention(DIM, HEADS)
        self.cosine = CosineSelfAttention(DIM, HEADS)
        self.drop = nn.Dropout(0.3)
        self.encoder = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, X, padding=None):
        X = X + self.drop(self.dot(X))
        X = self.norm(X + self.l2(X) + self.cosine(X))
        return self.encoder(X, src_key_padding_mask=padding)


def batches(count, size=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, TOKENS, DIM, generator=generator).to(dtype) for _ in range(count)]


def train(steps=5, watch=None, autocast=False, accumulate=1, dtype=torch.float32):
    """Losses, the model and its random state after some steps of training, with a monitor or without."""
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


def dense_norm(f, X):
    """The norm of the dense Jacobian of f at X [n, d], in float64."""
    J = torch.autograd.functional.jacobian(f, X.double(), vectorize=False)
    return torch.linalg.matrix_norm(J.reshape(-1, X.numel()), 2).item()


@pytest.mark.parametrize(
    "setting",
    [{}, {"autocast": True}, {"accumulate": 2}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}],
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


def test_a_copy_or_a_file_of_a_watched_model_is_a_plain_model():
    model = Small()
    monitor = SmoothnessMonitor(model)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    twin(batches(1)[0])
    with pytest.warns(SmoothnessWarning, match="did not run"):
        assert monitor.step() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: DotSelfAttention(DIM, HEADS, causal=True),
        lambda: DotSelfAttention(DIM, HEADS, qk_norm=True),
        lambda: L2SelfAttention(DIM, HEADS),
        lambda: ContractiveL2Attention(DIM, HEADS, 0.5),
        lambda: CosineSelfAttention(DIM, HEADS),
        lambda: nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 5), nn.GELU()),
    ],
    ids=["dot", "qk_norm", "l2", "contractive", "cosine", "any module"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_constant_is_that_of_the_dense_jacobian_at_the_present_weights(make, dtype):
    torch.manual_seed(1)
    model = nn.Sequential(make()).to(dtype)
    monitor = SmoothnessMonitor(model, ["0"], every=1, tol=1e-5)
    for X in batches(2, dtype=dtype):
        model(X)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        (reading,) = monitor.step()
        truth = dense_norm(copy.deepcopy(model).double(), X[0])
        assert reading.sigma == pytest.approx(truth, rel=1e-9 if dtype == torch.float64 else 2e-6)
        assert reading.residual <= 1e-4 and reading.tokens == TOKENS and reading.status in ("converged", "resolution")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, "causal", "boolean", "per head"])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_attention_with_masks_and_padding(batch_first, mask, padded):
    torch.manual_seed(2)
    model = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
    X = batches(1)[0]
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    given = {
        None: None,
        "causal": torch.zeros(TOKENS, TOKENS).masked_fill(hidden, -math.inf),
        "boolean": hidden,
        "per head": hidden.expand(3 * HEADS, -1, -1),
    }[mask]
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[0, 4:] = padded
    if mask == "causal":
        padding = torch.zeros(3, TOKENS).masked_fill(padding, -math.inf)
    monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
    tokens = X if batch_first else X.transpose(0, 1)
    model(tokens, tokens, tokens, key_padding_mask=padding if padded else None, attn_mask=given)
    (reading,) = monitor.step()

    n = 4 if padded else TOKENS
    exact = copy.deepcopy(model).double().eval()
    exact.batch_first = True

    def f(x):
        return exact(x[None], x[None], x[None], attn_mask=None if mask is None else hidden[:n, :n])[0][0]

    assert reading.sigma == pytest.approx(dense_norm(f, X[0, :n]), rel=2e-6)


def test_a_layer_with_more_arguments_is_measured_with_its_own_sample_of_them():
    torch.manual_seed(3)
    model = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.1, batch_first=True)
    X = batches(1)[0]
    padding = torch.zeros(3, TOKENS, dtype=torch.bool)
    padding[0, 4:] = True
    monitor = SmoothnessMonitor(model, [model], every=1, tol=1e-5)
    model(X, src_key_padding_mask=padding)
    (reading,) = monitor.step()
    exact = copy.deepcopy(model).double().eval()
    truth = dense_norm(lambda x: exact(x[None], src_key_padding_mask=padding[:1])[0], X[0])
    assert reading.sigma == pytest.approx(truth, rel=2e-6)


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
    for step in range(ANEW + 1):
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
    assert first.sigma == pytest.approx(truth.value, rel=1e-5) and others[-1].sigma <= truth.upper * (1 + 1e-6)


def test_it_works_under_no_grad_inference_mode_and_autocast():
    model = nn.Sequential(CosineSelfAttention(DIM, HEADS), DotSelfAttention(DIM, HEADS))
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        monitor = SmoothnessMonitor(model, every=1, tol=1e-5)
        for X in batches(2):
            with context:
                y = model[0](X)
                model[1](y)
                readings = monitor.step()
            truth = dense_norm(copy.deepcopy(model[0]).double(), X[0].clone())
            assert readings[0].sigma == pytest.approx(truth, rel=2e-6)


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
    monitor = SmoothnessMonitor(model, every=1, max_sigma=1e9, alarm=called.append, csv=tmp_path / "s.csv")
    model(torch.full((1, TOKENS, DIM), math.inf))
    assert [math.isnan(r.sigma) for r in monitor.step()] == [True, True]
    with torch.no_grad():
        model[0].query.weight.fill_(math.nan)
    model(batches(1)[0])
    assert all(math.isnan(r.sigma) for r in monitor.step())
    assert len(called) == 4
    with open(tmp_path / "s.csv") as file:
        assert [row["sigma"] for row in csv.DictReader(file)] == ["nan"] * 4


def test_a_layer_it_cannot_measure_is_named_once_and_the_rest_goes_on():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
            self.own = DotSelfAttention(DIM, HEADS)

        def forward(self, X):
            return self.own(X) + self.cross(X, X + 1, X + 1)[0]

    model = Two()
    monitor = SmoothnessMonitor(model, every=1)
    with pytest.warns(SmoothnessWarning, match=r"cross is not measured.*another key") as caught:
        for X in batches(3):
            model(X)
            readings = monitor.step()
            assert math.isnan(readings[0].sigma) and readings[1].sigma > 0
    assert len(caught) == 1


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
        assert monitor.step()[0].sigma == pytest.approx(torch.linalg.matrix_norm(model.map.weight, 2).item(), rel=1e-3)
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
        steps=5, watch=lambda m: SmoothnessMonitor(m, ["l2"], every=2, csv=path, log=lambda *a: logged.append(a))
    )
    assert logged == [({"sigma/l2": r.sigma}, r.step) for r in monitor.readings]
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [(int(r["step"]), r["layer"], float(r["sigma"])) for r in rows] == [
        (r.step, "l2", r.sigma) for r in monitor.readings
    ]
    assert list(rows[0]) == HEADER


def test_a_resumed_training_continues_the_file_without_doubles(tmp_path):
    path = tmp_path / "sigma.csv"
    model = DotSelfAttention(DIM, HEADS)

    def run(first, last):
        monitor = SmoothnessMonitor(model, every=2, csv=path)
        for number in range(first, last):
            model(batches(1)[0])
            monitor.step(number)

    def steps():
        with open(path) as file:
            return [int(row["step"]) for row in csv.DictReader(file)]

    run(0, 9)
    assert steps() == [0, 2, 4, 6, 8]
    with open(path, "a") as file:
        file.write("10,DotSelf")  # torn by a kill
    run(9, 13)
    assert steps() == [0, 2, 4, 6, 8, 10, 12]
    run(5, 11)
    assert steps() == [0, 2, 4, 6, 8, 10]
    run(0, 3)
    assert steps() == [0, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["sigma.csv"]


def test_what_is_wrong_is_said(tmp_path):
    model = nn.Sequential(DotSelfAttention(DIM, HEADS))
    strange = tmp_path / "strange.csv"
    strange.write_text("a,b\n1,2\n")
    for arguments, message in [
        ({"every": 0}, "every must be"),
        ({"max_sigma": -1.0}, "max_sigma must be"),
        ({"max_sigma": math.nan}, "max_sigma must be"),
        ({"tol": 0.0}, "tol must lie"),
        ({"layers": ["0.quary"]}, "did you mean '0.query'"),
        ({"layers": [nn.Linear(2, 2)]}, "has no layer this Linear"),
        ({"csv": tmp_path / "no" / "file.csv"}, "does not exist"),
        ({"csv": tmp_path}, "is a folder"),
        ({"csv": strange}, "no table of a SmoothnessMonitor"),
    ]:
        with pytest.raises(ls.UserError, match=message):
            SmoothnessMonitor(model, **arguments)
    assert strange.read_text() == "a,b\n1,2\n"
    with pytest.raises(ls.UserError, match="no attention that is known"):
        SmoothnessMonitor(nn.Linear(2, 2))
    with pytest.raises(ls.UserError, match="has its layers already"):
        SmoothnessMonitor(ModuleWatch(model), ["0"])


def test_patterns_choose_layers():
    model = nn.Sequential(*(DotSelfAttention(DIM, HEADS) for _ in range(3)))
    assert SmoothnessMonitor(model, ["[02]"]).watch.names == ("0", "2")
    assert SmoothnessMonitor(model, [model[1]]).watch.names == ("1",)
    assert SmoothnessMonitor(model).watch.names == ("0", "1", "2")


def test_a_batch_as_large_as_its_sequences_is_ambiguous_only_where_it_matters():
    model = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True)
    X = torch.randn(TOKENS, TOKENS, DIM)
    monitor = SmoothnessMonitor(model, [model], every=1)
    model(X)
    assert monitor.step()[0].sigma > 0
    model(X, src_mask=torch.zeros(TOKENS, TOKENS))
    with pytest.warns(SmoothnessWarning, match="one row a sample or one a token"):
        monitor.step()
