"""Budgets of whole models: against exact first-order errors and against real runs."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope._types import UserError
from lipscope.probes.budget.formats import read_format
from lipscope.probes.budget.result import BudgetRow
from lipscope.probes.budget.rounding import RoundingTrace
from tests.probes.budget.tiny import some_ids, tiny


@pytest.fixture(scope="module")
def budget():
    return ls.error_budget(
        tiny("llama"), some_ids(3, 24), formats="bf16,int8,w8a8,kv8", probes=48, observe=True
    )


@pytest.mark.wide
@pytest.mark.parametrize("name", ["bf16", "int8", "w8a8", "kv8"])
def test_predictions_are_close_to_real_runs(budget, name):
    total = budget.total(name)
    assert total.low < total.value < total.high
    assert 0.85 <= budget.observed[name] / total.value <= 1.15


def test_a_linear_layer_has_the_error_of_its_weight():
    layer = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8, bias=False)).double()
    ids = torch.arange(40)
    got = ls.error_budget(layer, ids, formats="int4:16", probes=2000, observe=True)
    quantise = read_format("int4:16").weight
    x, W = layer[0].weight[:40], layer[1].weight
    expected = ((x @ (quantise(W) - W).T).norm() / (x @ W.T).norm()).item()
    assert math.isclose(got.observed["int4:16"], expected, rel_tol=1e-9)
    assert math.isclose(got.total("int4:16").value, expected, rel_tol=0.06)
    assert got.second_order["int4:16"] < 1e-9


@pytest.mark.wide
def test_kl_is_predicted_in_nats_per_token():
    for kind in ("gpt2_lm", "llama_lm"):
        got = ls.error_budget(
            tiny(kind),
            some_ids(3, 24),
            formats="int8,int6:16",
            metric="kl",
            probes=48,
            observe=True,
        )
        for name in got.formats:
            assert 0.75 <= got.observed[name] / got.total(name).value <= 1.3, (kind, name)
        assert "nats per token" in repr(got)


def test_a_metric_of_the_users_own():
    def last_token(output):
        return output.last_hidden_state[:, -1]

    got = ls.error_budget(
        tiny("llama"), some_ids(4, 16), formats=["int8"], metric=last_token, probes=64, observe=True
    )
    assert got.metric == "last_token"
    assert 0.8 <= got.observed["int8"] / got.total("int8").value <= 1.25


def test_a_format_of_the_users_own_is_applied_to_out_by_in():
    seen = []

    def flipped(W):
        seen.append(tuple(W.shape))
        return -W

    got = ls.error_budget(
        tiny("gpt2"), some_ids(1, 8), formats={"flipped": flipped}, probes=2, observe=True
    )
    assert (96, 32) in seen  # c_attn, stored as [in, out] = [32, 96]
    assert got.second_order["flipped"] > 0.5
    assert "flipped" in got.warnings()[0] and "observe=True" in got.warnings()[0]


def test_the_model_is_left_alone():
    model = tiny("llama").train()
    before = {name: (p.clone(), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    ls.error_budget(model, some_ids(1, 8), formats="bf16,w8a8,kv8", probes=2, observe=True)
    assert model.training and model.config._attn_implementation == "eager"
    for name, p in model.named_parameters():
        old, dtype, wanted = before[name]
        assert torch.equal(p, old) and p.dtype == dtype and p.requires_grad == wanted
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_rows_shares_and_exports(budget, tmp_path):
    for name in budget.formats:
        rows = [row for row in budget.rows if row.format == name]
        assert math.isclose(sum(row.share for row in rows), 1.0, rel_tol=1e-9)
        for by in ("layer", "head", "kind"):
            assert math.isclose(sum(budget.shares(name, by).values()), 1.0, rel_tol=1e-9)
        assert all(row.low <= row.predicted <= row.high for row in rows)
        assert budget.keep_high(name, 1e-9) != [] and len(budget.keep_high(name, 1.0)) == len(rows)
    frame = budget.to_dataframe()
    assert list(frame.columns) == list(BudgetRow._fields)
    total = frame[(frame.kind == "total") & (frame.format == "int8")].iloc[0]
    assert total.predicted == budget.total("int8").value
    assert total.observed == budget.observed["int8"]
    budget.to_csv(tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text().count("\n") == len(frame) + 1
    budget.to_json(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text())["rows"][0]["format"] == "bf16"
    assert "int8" in repr(budget) and "int8" in budget._repr_html_()
    assert len(budget.plot().lines) >= 4


@pytest.mark.wide
def test_tolerances_hold_for_a_correct_run_and_not_for_a_wrong_one(budget):
    ids, right = some_ids(3, 24), tiny("llama").double()
    port = tiny("llama").bfloat16()
    exact = right(ids, output_hidden_states=True).hidden_states
    for state in (0, 1, 2, -1):
        got = port(ids, output_hidden_states=True).hidden_states[state].double()
        torch.testing.assert_close(got, exact[state], **budget.tolerance(state, "bf16"))
    port.layers[1].mlp.down_proj.weight.data *= 1.2
    wrong = port(ids, output_hidden_states=True).hidden_states[2].double()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, exact[2], **budget.tolerance(state=2, format="bf16"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 1}, "probes must be at least 2"),
        ({"probes": -3}, "probes must be a positive number"),
        ({"formats": "int99"}, "there is no format"),
        ({"metric": "kl"}, "needs logits"),
        ({"text": "some words"}, "token ids"),
        ({"text": torch.zeros(3)}, "token ids must be integers"),
    ],
)
def test_mistakes_are_named(options, message):
    arguments = {"text": some_ids(1, 8), "formats": "int8", **options}
    text = arguments.pop("text")
    with pytest.raises(ls.UserError, match=message):
        ls.error_budget(tiny("llama"), text, **arguments)


def test_questions_about_other_formats_are_errors(budget):
    with pytest.raises(ls.UserError, match="this budget has no format 'int4'"):
        budget.total("int4")
    with pytest.raises(ls.UserError, match="tolerances exist for runs in"):
        budget.tolerance(0, "int8")
    with pytest.raises(ls.UserError, match="shares are by layer"):
        budget.shares("int8", "site")


def test_kl_of_a_folder_needs_a_head(tmp_path):
    tiny("gpt2_lm").save_pretrained(tmp_path / "lm")
    tiny("bert").save_pretrained(tmp_path / "trunk")
    ids = some_ids(1, 8)
    named = ls.error_budget(str(tmp_path / "lm"), ids, formats="int8", metric="kl", probes=2)
    live = ls.error_budget(tiny("gpt2_lm"), ids, formats="int8", metric="kl", probes=2)
    assert math.isclose(named.total("int8").value, live.total("int8").value, rel_tol=1e-6)
    with pytest.raises(ls.UserError, match="language-model head"):
        ls.error_budget(str(tmp_path / "trunk"), ids, formats="int8", metric="kl", probes=2)
    with pytest.raises(ls.UserError, match="was loaded without its head"):
        ls.error_budget(ls.load(tiny("gpt2_lm")), ids, formats="int8", metric="kl", probes=2)


class TwoExperts(nn.Module):
    """One of two maps per token; which one hangs on a difference that bf16 does not see."""

    def __init__(self, border=1.003):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 16)
        self.router = nn.Linear(16, 1, bias=False)
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.router.weight.data.zero_()[0, :2] = torch.tensor([1.0, -1.0029])
        self.embed.weight.data[0, :2] = torch.tensor([border, 1.0])

    def forward(self, ids):
        x = self.embed(ids)
        return torch.where(self.router(x) > 0, self.experts[0](x), self.experts[1](x))


@pytest.mark.parametrize("size", [2.0**-10, 1.0, 2.0**10])
def test_decisions_that_bf16_takes_otherwise_are_in_the_budget(size):
    """Whatever the size of the output: shares and totals are relative."""
    model, ids = TwoExperts(), torch.arange(20)
    for parameter in model.experts.parameters():
        parameter.data *= size
    budget = ls.error_budget(model, ids, formats="bf16", probes=8)
    with torch.no_grad():
        low = copy.deepcopy(model).bfloat16()(ids).double()
        exact = copy.deepcopy(model).double()(ids)
    assert (low - exact)[0].norm() > 0.5 * (low - exact).norm()  # the token that was switched
    assert 0.8 <= (low - exact).norm() / exact.norm() / budget.total("bf16").value <= 1.25
    (row,) = (row for row in budget.rows if row.kind == "decision")
    assert row.site == "other decisions" and row.share > 0.5
    assert budget.keep_high("bf16", 1.0) and row.site not in budget.keep_high("bf16", 1.0)
    assert "not linear" in budget.warnings()[0]
    usual = ls.error_budget(model, ids[1:], formats="bf16", probes=8)
    assert "decision" not in usual.shares("bf16", by="kind") and not usual.warnings()


def test_a_decision_behind_a_twentieth_of_the_error_is_in_the_budget():
    """From a hundredth of the error on, which is a ten-thousandth of its square."""
    model, ids = TwoExperts(), torch.arange(20)
    for one, other in zip(*(e.parameters() for e in model.experts), strict=True):
        other.data = one.data * (1 + 6e-4)
    budget = ls.error_budget(model, ids, formats="bf16", probes=8)
    (row,) = (row for row in budget.rows if row.kind == "decision")
    assert 0.03 < row.share**0.5 < 0.1


class Copies(nn.Module):
    """Several streams that differ by less than a step of bf16, and their mean."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        self.branch = nn.Linear(32, 32)
        self.count = count

    def forward(self, ids):
        x = self.embed(ids)
        streams = [x + self.branch(x) * (1 + 1e-4 * k) for k in range(self.count)]
        return torch.stack(streams).float().mean(dim=0)


class Settled(nn.Module):
    """A loop z = x + z / 2 that reaches its fixed point."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        self.count = count

    def forward(self, ids):
        x = z = self.embed(ids)
        for _ in range(self.count):
            z = x + 0.5 * z
        return z


@pytest.mark.parametrize("kind", [Copies, Settled])
def test_errors_that_repeat_are_in_the_budget(kind):
    """Equal errors add up before they are squared, as in the real run, which is made here."""
    model, ids = kind(16), torch.arange(40)
    budget = ls.error_budget(model, ids, formats="bf16")
    with torch.no_grad():
        low = copy.deepcopy(model).bfloat16()(ids).double()
        exact = copy.deepcopy(model).double()(ids)
    assert 0.9 <= (low - exact).norm() / exact.norm() / budget.total("bf16").value <= 1.1
    (row,) = (row for row in budget.rows if row.kind == "repeat")
    assert row.site == "other repeats" and row.share > 0.3
    assert "equal roundings" in budget.warnings()[0]
    # Only what can be kept in high precision is named, and half of that.
    kept = budget.keep_high("bf16")
    shares = {row.site: row.share for row in budget.rows if row.kind != "repeat"}
    assert set(kept) <= set(shares)
    assert sum(shares[site] for site in kept) >= 0.5 * sum(shares.values())
    assert sum(shares[site] for site in kept[:-1]) < 0.5 * sum(shares.values())
    usual = ls.error_budget(kind(1), ids, formats="bf16")
    assert "repeat" not in usual.shares("bf16", by="kind") and not usual.warnings()


@pytest.mark.wide
def test_errors_seldom_look_repeated_by_chance():
    """At most 1 % of sequences of models without repeats; 3 of 60 happen in one of 50 tests."""
    found = []
    for seed in range(5):
        for kind, n in (("bert", 4), ("gpt2", 16), ("qwen3", 32)):
            budget = ls.error_budget(tiny(kind, seed=seed), some_ids(4, n, seed), formats="bf16")
            found += [row.share for row in budget.rows if row.kind == "repeat"]
    assert len(found) <= 2, found


def test_errors_that_were_not_noted_are_no_repeats(monkeypatch):
    noted = RoundingTrace._note

    def forgetful(trace, name, *rest):
        noted(trace, name, *rest)
        if name == "add":
            trace.noted.pop()

    monkeypatch.setattr(RoundingTrace, "_note", forgetful)
    budget = ls.error_budget(Copies(1), torch.arange(40), formats="bf16", observe=True)
    assert budget.observed["bf16"] > 1.2 * budget.total("bf16").value
    assert "repeat" not in budget.shares("bf16", by="kind")


def test_decisions_that_a_weight_format_takes_otherwise_are_warned_of():
    """1.0025 - 1.0029 < 0, and 1.0025 - 1 > 0 with rounded weights, in the last sequence."""
    model, ids = TwoExperts(border=1.0025), torch.arange(20).reshape(5, 4).flip(0)
    rounded = {"coarse": lambda W: W.bfloat16().to(W)}
    budget = ls.error_budget(model, ids, formats=rounded, probes=16, observe=True)
    assert budget.observed["coarse"] > 2 * budget.total("coarse").value
    assert budget.second_order["coarse"] > 0.9
    assert "coarse" in budget.warnings()[0]
    usual = ls.error_budget(model, ids[:4], formats=rounded, probes=16, observe=True)
    assert not usual.warnings()


class Cancelling(nn.Module):
    """Digits are lost in the difference of two large numbers, in the layer that is asked for."""

    def __init__(self, large):
        super().__init__()
        torch.manual_seed(0)
        self.large = large
        self.embed = nn.Embedding(60, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = (x * self.large).cos() if self.large == torch.inf else x + self.large
                x = x - self.large if self.large < torch.inf else x
        return x


def test_a_prediction_beyond_the_output_names_its_site():
    with pytest.raises(UserError, match=r"predicted error in bf16 is .*comes from other add"):
        ls.error_budget(Cancelling(1e4), some_ids(), formats="bf16")
    budget = ls.error_budget(Cancelling(1e4), some_ids(), formats="int8")
    assert budget.total("int8").value < 0.1


def test_a_prediction_that_is_not_a_number_names_its_site():
    model = tiny("llama_lm")
    model.model.layers[1].mlp.down_proj.weight.data[3, 4] = torch.inf
    for format, metric in (("int8", "kl"), ("int4:8", "output")):
        with pytest.raises(UserError, match=rf"in {format} is (nan|inf).*|non-finite"):
            ls.error_budget(model, some_ids(), formats=format, metric=metric)


def test_coarse_formats_may_destroy_the_output():
    budget = ls.error_budget(tiny("gpt2"), some_ids(), formats={"twice": lambda w: 12 * w})
    assert budget.total("twice").value > 1


def test_a_comparison_never_explains_by_an_impossible_prediction():
    # A norm that divides by almost nothing: the budget is far above the state.
    right, port = tiny("llama"), tiny("llama")
    for model in (right, port):
        embedding = model.embed_tokens.weight.data
        embedding[:] = 1.0 + 1e-6 * embedding
        model.layers[0].input_layernorm.weight.data *= 1e4
        weight = model.layers[0].self_attn.v_proj.weight.data
        weight -= weight.mean(dim=1, keepdim=True)
    port.layers[2].mlp.down_proj.weight.data.neg_()
    with pytest.raises(UserError, match="which rounding cannot explain; most of it comes from"):
        ls.check_run(right, port.bfloat16(), some_ids())
