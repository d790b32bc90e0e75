"""Budgets and comparisons of plain modules that do unusual things, against runs made by hand."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lipscope as ls
from lipscope.probes.budget.subject import copied

WIDTH = 32
IDS = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(1))


class Odd(nn.Module):
    """A linear map of embeddings, a way from its output to the next one, and that map."""

    def __init__(self, between=lambda model, x: x):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, ids):
        return self.second(self.between(self, self.first(self.embed(ids))))


def odd(between, **parts):
    model = Odd(between)
    for name, part in parts.items():
        setattr(model, name, part)
    return model.eval()


def statistics(norm):
    """A norm whose statistics are not numbers of bf16."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.weight.data.uniform_(0.5, 2)
    return norm


def along_channels(model, x):
    return model.norm(x.mT).mT


def buffered(model, x):
    mean, variance = model.norm.running_mean, model.norm.running_var
    return nn.functional.batch_norm(
        input=x.mT, running_mean=mean, running_var=variance, eps=1e-3
    ).mT


def without_gradients(model, x):
    with torch.no_grad():
        return x * 2


def through_data(model, x):
    x.data *= 3
    return x


def real_error(exact, low):
    """The relative error of all rows together, with tensors that a module returns, or holds."""
    with torch.no_grad():
        pairs = [(first(exact(row[None])), first(low(row[None])).double()) for row in IDS]
    wrong = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(wrong / sum(float(a.square().sum()) for a, _ in pairs))


def first(output):
    if isinstance(output, dict):
        return output["last_hidden_state"]
    return output[0] if isinstance(output, tuple) else output


def in_int8(model):
    """The model with every linear layer rounded: one scale per output."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            scale = part.weight.data.abs().amax(dim=1, keepdim=True) / 127
            part.weight.data = (part.weight.data / scale).round() * scale
    return model


class Returning(Odd):
    """A model whose output is a tensor in something, or a number."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, ids):
        return self.wrap(super().forward(ids))


def followed():
    """Modules whose runs the budget follows."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
    yield "batch norm", odd(along_channels, norm=statistics(nn.BatchNorm1d(WIDTH)))
    yield "by keywords", odd(buffered, norm=statistics(nn.BatchNorm1d(WIDTH)))
    yield (
        "without statistics",
        odd(along_channels, norm=nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    )
    instance = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
    yield "instance norm", odd(along_channels, norm=statistics(instance))
    yield "no_grad", odd(without_gradients)
    yield "detach", odd(lambda model, x: x.detach())
    yield "data", odd(through_data)
    yield "a parameter", odd(lambda model, x: x @ model.weight, weight=weight)
    yield "tuple", Returning(lambda x: (x, x.sum())).eval()
    yield "dict", Returning(lambda x: {"last_hidden_state": x}).eval()
    yield "number", Returning(lambda x: x.square().mean()).eval()


FOLLOWED = dict(followed())


@pytest.mark.parametrize("kind", FOLLOWED)
def test_budgets_predict_real_runs(kind):
    model = FOLLOWED[kind]
    exact = copy.deepcopy(model).double()
    budget = ls.error_budget(model, IDS, formats="bf16,int8", observe=True, probes=32)
    real = {"bf16": real_error(exact, copy.deepcopy(model).bfloat16())}
    if kind != "a parameter":  # which the quantiser of this file does not round
        real["int8"] = real_error(exact, in_int8(exact))
    for name, error in real.items():
        assert math.isclose(budget.observed[name], error, rel_tol=1e-9)
        total = budget.total(name)
        scatter = 2.0 if kind == "number" else 1.25  # one number is one normal variable
        assert total.value / scatter <= error <= scatter * total.value, (name, total, error)
    assert {row.site for row in budget.rows if row.format == "int8"} >= {"first", "second"}
    assert not budget.warnings()


def test_numbers_that_leave_torch_are_warned_of():
    """What int8 does to the first layer passes as plain numbers, without a derivative."""
    model = odd(lambda model, x: torch.tensor(x.detach().double().numpy()).to(x.dtype))
    budget = ls.error_budget(model, IDS, formats="int8", observe=True, probes=64)
    assert budget.observed["int8"] > 1.2 * budget.total("int8").value
    assert budget.second_order["int8"] > 0.5 and "not linear" in budget.warnings()[0]


def test_weights_made_of_parameters_are_refused_and_latents_are_not():
    torch.manual_seed(0)
    parts = {"A": nn.Parameter(torch.randn(4, WIDTH)), "B": nn.Parameter(torch.randn(WIDTH, 4))}
    adapted = odd(
        lambda m, x: nn.functional.linear(x, m.third.weight + m.B @ m.A),
        **parts,
        third=nn.Linear(WIDTH, WIDTH),
    )
    with pytest.raises(ls.UserError, match=r"from the parameters A, B, third\.weight"):
        ls.error_budget(adapted, IDS, formats="int8")
    normed = odd(
        lambda m, x: m.third(x),
        third=nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    )
    with pytest.raises(ls.UserError, match=r"parameters third\.parametrizations\.weight\.original"):
        ls.error_budget(normed, IDS, formats="int8")
    latents = odd(
        lambda m, x: (m.query(m.latents) @ x.mT).softmax(-1) @ x,
        latents=nn.Parameter(torch.randn(5, WIDTH)),
        query=nn.Linear(WIDTH, WIDTH),
    )
    budget = ls.error_budget(latents, IDS, formats="int8")
    assert {row.site for row in budget.rows} == {"first", "second", "query"}


def test_interpolated_positions_are_not_taken_for_weights():
    def with_positions(model, x):
        resized = nn.functional.interpolate(model.positions, (4, 3), mode="bilinear")
        return x + resized.flatten(2).mT

    model = odd(with_positions, positions=nn.Parameter(torch.randn(1, WIDTH, 2, 2)))
    budget = ls.error_budget(model, IDS, formats="int8")
    assert {row.site for row in budget.rows} == {"first", "second"}


@pytest.mark.parametrize(
    ("model", "formats", "message"),
    [
        (nn.Sequential(nn.Embedding(40, 8)), "int8", "embeddings=True"),
        (
            odd(lambda m, x: checkpoint(nn.functional.gelu, x, use_reentrant=False)),
            "bf16",
            "differentiated",
        ),
        (Returning(lambda x: x.argmax(-1)), "bf16", "no floating-point numbers"),
        (nn.Sequential(nn.Embedding(9, 8)), "bf16", "does not run on these inputs"),
        (Returning(lambda x: {"codes": torch.complex(x, x)}), "bf16", "no floating-point numbers"),
    ],
)
def test_what_has_no_budget_is_refused_with_a_sentence(model, formats, message):
    with pytest.raises(ls.UserError, match=message):
        ls.error_budget(model.eval(), IDS, formats=formats)


def test_a_run_without_any_error_has_a_budget_of_zero():
    budget = ls.error_budget(nn.Sequential(nn.Embedding(40, 8)), IDS, formats="fp32", observe=True)
    assert budget.total("fp32") == (0, 0, 0) and budget.observed["fp32"] == 0
    assert budget.keep_high("fp32") == []


def test_models_without_a_list_of_layers_are_not_compared():
    with pytest.raises(ls.UserError, match="no list of layers"):
        ls.check_run(Odd(), Odd().bfloat16(), IDS)
    # The list of what computes a weight is none.
    normed = odd(
        lambda m, x: m.third(x),
        third=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )
    with pytest.raises(ls.UserError, match="no list of layers"):
        ls.check_run(normed, copy.deepcopy(normed).bfloat16(), IDS)


def test_tensors_kept_in_containers_do_not_prevent_copies():
    model = odd(lambda m, x: x + m.kept.setdefault("bias", [m.first.bias * 2])[0], kept={})
    model(IDS[:1])
    assert model.kept["bias"][0].grad_fn is not None
    copy_of = copied(model)
    assert torch.equal(copy_of.kept["bias"][0], model.kept["bias"][0])
    assert copy_of.kept["bias"][0].is_leaf


def test_worst_cases_bound_what_passes_without_gradients():
    """Only the first layer has an error, and its output passes under no_grad."""
    model = odd(without_gradients)
    coarse = {"coarse": lambda W: W + 0.1 * (W - model.second.weight.to(W)).sign()}
    budget = ls.error_budget(model, IDS[:1], formats=coarse, worst=True, observe=True)
    assert budget.worst["coarse"] > budget.observed["coarse"] > 0.05
