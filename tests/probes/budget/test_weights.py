"""Which parameters a format of weights rounds, and along which dimensions."""

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssModel,
    MixtralConfig,
    MixtralForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaModel,
)

import lipscope as ls
from lipscope._types import UserError
from lipscope.probes.budget.formats import symmetric
from lipscope.probes.budget.subject import read_subject
from lipscope.probes.budget.weights import _operands
from tests.probes.budget.tiny import GROUPED, some_ids

# All experts for every token: choosing others would not be an error to first order.
MOE = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 4, "num_hidden_layers": 2}


def weights(model):
    subject = read_subject(model, some_ids(1, 12), head=False, length=64, samples=1)
    return {w.name: w for w in subject.weights()}


def int8(matrix):
    """Round the rows of a matrix [out, in] by hand."""
    scale = matrix.abs().amax(dim=1, keepdim=True) / 127
    return (matrix / scale).round() * scale


def test_experts_are_rounded_along_their_inputs():
    torch.manual_seed(0)
    # F.linear with [experts, out, in], and x @ W with [experts, in, out].
    for model, name, transposed in (
        (MixtralForCausalLM(MixtralConfig(**MOE)), "model.layers.1.mlp.experts.down_proj", False),
        (GptOssModel(GptOssConfig(**MOE)), "layers.1.mlp.experts.down_proj", True),
    ):
        found = weights(model)[name]
        parameter = model.get_parameter(name).detach().double()
        matrices = parameter.mT if transposed else parameter
        by_hand = torch.stack([int8(matrix) for matrix in matrices]) - matrices
        by_hand = by_hand.mT if transposed else by_hand
        torch.testing.assert_close(found.error(lambda w: symmetric(w, bits=8)), by_hand)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_budgets_of_mixtures_price_every_matrix_product(kind):
    torch.manual_seed(0)
    model = (
        MixtralForCausalLM(MixtralConfig(**MOE))
        if kind == "mixtral"
        else GptOssModel(GptOssConfig(**MOE))
    )
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.ndim > 1 else 1
    ids = some_ids(3, 16)
    budget = ls.error_budget(model, ids, formats="int8", probes=64, observe=True)
    large = {
        name.removesuffix(".weight")
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
        else name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not name.endswith("bias") and "embed" not in name
    }
    assert {row.site for row in budget.rows} == large - {"lm_head"}
    # Against a model whose weights were really rounded, by code of its own.
    rounded = {}
    for name, parameter in model.named_parameters():
        W = parameter.detach().double()
        if name in large or name.removesuffix(".weight") in large - {"lm_head"}:
            turned = kind == "gpt_oss" and W.ndim == 3
            W = W.mT if turned else W
            W = torch.stack([int8(m) for m in W]) if W.ndim == 3 else int8(W)
            W = W.mT if turned else W
        rounded[name] = W
    trunk = getattr(model, "model", model).double()
    trunk.config._experts_implementation_internal = "eager"
    with torch.no_grad():
        exact = [trunk(row[None]).last_hidden_state for row in ids]
        model.load_state_dict(rounded)
        low = [trunk(row[None]).last_hidden_state for row in ids]
    error = sum((a - b).square().sum() for a, b in zip(exact, low, strict=True))
    observed = (error / sum(a.square().sum() for a in exact)).sqrt()
    assert abs(budget.observed["int8"] / observed - 1) < 1e-3
    assert 0.8 <= observed / budget.total("int8").value <= 1.25


class Odd(nn.Module):
    """Weights in every shape that a product takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(60, 8)
        self.heads = nn.Parameter(0.3 * torch.randn(2, 8, 5))  # [head, in, out] by einsum
        self.merge = nn.Parameter(0.3 * torch.randn(2, 5, 8))  # [head and in, out] by einsum
        self.chosen = nn.Parameter(0.3 * torch.randn(3, 8, 8))  # gathered for every token
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.back = nn.ConvTranspose1d(6, 8, 1)
        self.left = nn.Parameter(0.3 * torch.randn(8, 8))
        self.scale = nn.Parameter(0.3 * torch.randn(1, 8))
        self.mixing = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids):
        x = self.embed(ids)
        x = torch.einsum("bhnk,hkd->bnd", torch.einsum("bnd,hdk->bhnk", x, self.heads), self.merge)
        x = torch.matmul(x.flatten(0, 1)[:, None], self.chosen[ids.flatten() % 3]).view_as(x)
        x = self.back(self.conv(x.mT)).mT * self.scale
        x = (self.left @ x.mT).mT
        return self.mixing(x, x, x)[0]


def test_outputs_and_inputs_of_every_kind_of_product():
    found = {name: (w.outputs, w.inputs) for name, w in weights(Odd()).items()}
    assert found == {
        "heads": ((0, 2), (1,)),
        "merge": ((2,), (0, 1)),
        "chosen": ((2,), (1,)),
        "conv": ((0,), (1, 2)),
        "back": ((1,), (0, 2)),
        "left": ((0,), (1,)),
        "mixing.in_proj_weight": ((0,), (1,)),
        "mixing.out_proj": ((0,), (1,)),
    }
    budget = ls.error_budget(Odd(), some_ids(), formats="int8,fp8", probes=64, observe=True)
    for name in budget.formats:
        assert 0.8 <= budget.observed[name] / budget.total(name).value <= 1.25


def test_weights_computed_from_parameters_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(60, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    torch.nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(UserError, match=r"parameters 1\.parametrizations\.weight\.original0"):
        ls.error_budget(model, some_ids(), formats="int8")
    assert ls.error_budget(model, some_ids(), formats="bf16").total("bf16").value > 0


def test_activations_out_of_reach_are_refused_by_name():
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**MOE))
    with pytest.raises(UserError, match=r"w8a8 also rounds what model\.layers\.0\.mlp\.gate"):
        ls.error_budget(model, some_ids(), formats="w8a8")


def test_parameters_that_only_scale_are_left_alone():
    sizes = {**GROUPED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8}
    model = RecurrentGemmaModel(RecurrentGemmaConfig(**sizes))
    names = set(weights(model))
    assert "layers.0.temporal_block.rg_lru.recurrent_gate_weight" in names
    assert not any("norm" in name or "recurrent_param" in name for name in names)


@pytest.mark.parametrize(
    ("name", "args", "sums"),
    [
        ("linear", [(2, 5, 3), (7, 3)], "bni,oi->bno"),
        ("mm", [(5, 3), (3, 7)], "ni,io->no"),
        ("bmm", [(2, 5, 3), (2, 3, 7)], "bni,bio->bno"),
        ("mv", [(5, 3), (3,)], "ni,i->n"),
        ("addmm", [(5, 7), (5, 3), (3, 7)], "ni,io->no"),
        ("addmv", [(5,), (5, 3), (3,)], "ni,i->n"),
        ("baddbmm", [(2, 5, 7), (2, 5, 3), (2, 3, 7)], "bni,bio->bno"),
        ("addbmm", [(5, 7), (2, 5, 3), (2, 3, 7)], "bni,bio->no"),
    ],
)
def test_operands_of_a_product_are_summed_along_these_dimensions(name, args, sums):
    """Against the letters of einsum: those that are gone from the result are summed."""
    given = [torch.randn(shape) for shape in args]
    result = getattr(torch.ops.aten, name)(*given)
    added = given[0] if len(given) == 3 else 0.0
    torch.testing.assert_close(torch.einsum(sums, *given[-2:]) + added, result)
    words, out = sums.split("->")
    for (x, outputs, inputs), letters in zip(_operands(name, given), words.split(","), strict=True):
        assert letters[inputs[0]] not in out and len(inputs) == 1
        assert all(letters[d] in out for d in outputs)
        assert x.ndim == len(letters)
