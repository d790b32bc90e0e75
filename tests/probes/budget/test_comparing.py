"""Comparing runs: correct ports pass, planted bugs are named at their layer."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaModel

import lipscope as ls
from lipscope.probes.budget import comparing
from lipscope.probes.budget.comparing import _peak, state_budgets
from lipscope.probes.budget.subject import read_subject
from tests.probes.budget.tiny import GROUPED, some_ids, tiny

IDS = some_ids(2, 24)


def scaled(part, factor):
    part.weight.data *= factor


def set_eps(part, eps):
    part.variance_epsilon = eps


def swapped_heads(attention):
    W = attention.o_proj.weight
    W.data = torch.cat([W.data[:, 8:16], W.data[:, :8], W.data[:, 16:]], dim=1)


def other_base(model):
    model.rotary_emb.inv_freq.data **= 1.2


class Relu(nn.Module):
    def forward(self, x):
        return x.relu()


BUGS = {
    "down projection off by 10 %": (lambda m: scaled(m.layers[1].mlp.down_proj, 1.1), 1),
    "swapped heads": (lambda m: swapped_heads(m.layers[0].self_attn), 0),
    "scale of the scores": (lambda m: setattr(m.layers[1].self_attn, "scaling", 0.1), 1),
    "another activation": (lambda m: setattr(m.layers[2].mlp, "act_fn", Relu()), 2),
    "another RoPE base": (other_base, 0),
    "wrong eps": (lambda m: set_eps(m.layers[1].input_layernorm, 3e-1), 1),
    "a norm that is missing": (lambda m: m.norm.weight.data.mul_(1.05), 2),
    "another embedding": (lambda m: m.embed_tokens.weight.data[3:].mul_(1.05), None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_named_at_its_layer(bug):
    plant, layer = BUGS[bug]
    port = tiny("llama").bfloat16()
    port.rotary_emb.inv_freq.data = tiny("llama").rotary_emb.inv_freq.data
    plant(port)
    found = ls.check_run(tiny("llama"), port, IDS, probes=4)
    assert not found.ok and found.format == "bf16"
    assert found.first_outside.name == ("embeddings" if layer is None else f"layer {layer}")
    assert "outside its budget" in repr(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kind", "attention"), [("bert", "sdpa"), ("gpt2", "eager")])
def test_a_correct_port_passes(kind, attention, dtype):
    port = tiny(kind, attention).to(dtype)
    found = ls.check_run(tiny(kind), port, IDS, probes=4)
    assert found.ok, found
    assert all(0.7 <= state.ratio <= 1.3 for state in found.states)
    assert "hidden state" in found._repr_html_() and len(found.to_dataframe()) == 4
    wide = found.format == "fp32"
    assert found.sentence().endswith("compare in fp32 to see smaller bugs") != wide


def test_a_port_with_rounded_buffers_passes():
    """module.bfloat16() also rounds the frequencies of rotary positions, which turns far tokens."""
    rotary = {"rope_type": "default", "rope_theta": 3.0}
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**GROUPED, rope_parameters=rotary)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data *= 12 if "q_proj" in name or "k_proj" in name else 3
    port, ids = copy.deepcopy(model).bfloat16(), some_ids(1, 160)
    assert port.rotary_emb.inv_freq.dtype == torch.bfloat16
    found = ls.check_run(model, port, ids, probes=4)
    assert found.ok and max(state.ratio for state in found.states) < 1.6, found
    port.layers[1].mlp.down_proj.weight.data.neg_()
    assert ls.check_run(model, port, ids, probes=4).first_outside.name == "layer 1"


def test_hidden_states_of_another_engine(tmp_path):
    port = tiny("gpt2").bfloat16()
    with torch.no_grad():
        states = port(IDS, output_hidden_states=True).hidden_states
    tensors = {f"hidden_states.{i}": h.contiguous() for i, h in enumerate(states)}
    path = tmp_path / "states.safetensors"
    save_file({**tensors, "input_ids": IDS}, path)
    assert ls.check_run(tiny("gpt2"), path, probes=4).ok
    tensors["hidden_states.2"] = tensors["hidden_states.2"] * 1.05
    save_file({**tensors, "input_ids": IDS}, path)
    assert ls.check_run(tiny("gpt2"), str(path), probes=4).first_outside.name == "layer 1"
    # A single sequence is as good as two, and one state too few is not.
    one = {name: h[:1].clone() for name, h in tensors.items()}
    save_file({**one, "input_ids": IDS[:1]}, path)
    assert ls.check_run(tiny("gpt2"), path, probes=4).first_outside.name == "layer 1"


@pytest.mark.wide
def test_a_run_that_is_wrong_by_a_quarter_of_its_budget_is_outside(tmp_path):
    """The margin on top of chance: 1.05 times the quantile is inside, 1.25 times is not."""
    model = tiny("gpt2")
    with torch.no_grad():
        exact = model.double()(IDS, output_hidden_states=True).hidden_states
    right = ls.check_run(tiny("gpt2"), tiny("gpt2").bfloat16(), IDS, probes=4)
    path = tmp_path / "states.safetensors"
    for factor, name in ((1.05, None), (1.25, "layer 1")):
        states = list(exact)
        noise = torch.randn(exact[2].shape, dtype=torch.float64)
        chance = right.states[2].limit / comparing.MARGIN
        size = factor * chance * right.states[2].predicted * exact[2].norm()
        states[2] = exact[2] + noise * size / noise.norm()
        tensors = {f"hidden_states.{i}": h.contiguous() for i, h in enumerate(states)}
        save_file({**tensors, "input_ids": IDS}, path)
        found = ls.check_run(tiny("gpt2"), path, probes=4, format="bf16")
        assert (found.first_outside and found.first_outside.name) == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"squared": math.nan}, "nan of its norm is no bound"),
        ({"squared": math.inf}, "inf of its norm is no bound"),
        ({"squared": 1e30}, "of its norm is no bound"),
        ({"squared": 1e-2, "made": 1e-5}, "in a run of the reference itself"),
        ({"made": 1e-2}, "in a run of the reference itself"),
        ({"made": math.nan}, "in a run of the reference itself"),
    ],
)
def test_a_prediction_that_means_nothing_explains_nothing(monkeypatch, change, message):
    right = comparing.state_budgets

    def state_budgets(*args, **options):
        budgets, states = right(*args, **options)
        budgets[1] = replace(budgets[1], **{k: v * budgets[1].size for k, v in change.items()})
        return budgets, states

    monkeypatch.setattr(comparing, "state_budgets", state_budgets)
    with pytest.raises(ls.UserError, match=message) as caught:
        ls.check_run(tiny("gpt2"), tiny("gpt2").bfloat16(), IDS, probes=4)
    assert "the effect of rounding on layer 0 cannot be predicted" in str(caught.value)


def test_a_port_that_does_not_run_is_one_sentence():
    port = tiny("gpt2").bfloat16()
    port.h[1].mlp.c_fc.float()
    with pytest.raises(ls.UserError, match=r"does not run in bfloat16 on these inputs \("):
        ls.check_run(tiny("gpt2"), port, IDS)


def test_a_run_without_finite_values_is_outside():
    port = tiny("gpt2").bfloat16()
    port.h[1].mlp.c_fc.bias.data[0] = torch.nan
    found = ls.check_run(tiny("gpt2"), port, IDS, probes=2)
    assert found.first_outside.name == "layer 1"


def test_other_dtypes_need_a_format():
    with pytest.raises(ls.UserError, match="the run is in float64, which has no budget"):
        ls.check_run(tiny("gpt2"), tiny("gpt2").double(), IDS)
    with pytest.raises(ls.UserError, match="format must be one of"):
        ls.check_run(tiny("gpt2"), tiny("gpt2"), IDS, format="int8")


@pytest.mark.slow
def test_false_alarms_of_clean_runs():
    """pytest -m slow tests/probes/budget/test_comparing.py: 300 clean runs, at most 1 % alarms."""
    alarms = 0
    for seed in range(300):
        kind = ("bert", "gpt2", "llama", "qwen3")[seed % 4]
        dtype = (torch.bfloat16, torch.float16)[seed // 4 % 2]
        attention = ("eager", "sdpa")[seed // 8 % 2]
        ids = some_ids(1 + seed % 3, (12, 24, 40)[seed % 3], seed)
        port = tiny(kind, attention, seed)
        for parameter in port.parameters():
            parameter.data = parameter.data.to(dtype)
        alarms += not ls.check_run(tiny(kind, seed=seed), port, ids, probes=4, seed=seed).ok
    assert alarms <= 8  # 3 expected; 9 or more have probability 0.4 %


@pytest.mark.parametrize(("format", "said"), [(None, "bf16"), ("fp16", "fp16")])
def test_a_run_that_is_named_runs_in_bf16_unless_a_format_is_given(tmp_path, format, said):
    tiny("gpt2").save_pretrained(tmp_path / "port")
    found = ls.check_run(tiny("gpt2"), str(tmp_path / "port"), IDS, probes=4, format=format)
    assert found.ok and found.format == said
    # The run did round: its error is of the size of the format's step, not of float32's.
    eps = torch.finfo(comparing.DTYPES[said]).eps
    assert all(eps / 8 < state.observed < 8 * eps for state in found.states)


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_the_peak_of_an_error_is_its_largest_row_or_column_over_the_mean(size):
    error = torch.full((4, 6), size, dtype=torch.float64)
    assert _peak(error) == pytest.approx(1.0)
    one = torch.zeros(4, 6, dtype=torch.float64)
    one[2] = size  # one of four rows has all of it
    assert _peak(one) == pytest.approx(2.0) == _peak(one.T)
    one[:, :] = 0
    one[1, 5] = size  # one entry: its column is one of six
    assert _peak(one) == pytest.approx(6**0.5)


def test_without_an_error_nothing_stands_out():
    assert _peak(torch.zeros(4, 6, dtype=torch.float64)) == 1.0


@pytest.mark.parametrize(("kind", "norm"), [("llama", "norm"), ("gpt2", "ln_f"), ("bert", None)])
def test_the_state_before_a_final_norm_is_one_more_state(kind, norm):
    subject = read_subject(tiny(kind), some_ids(2, 8), head=False, length=8, samples=2)
    low = subject.in_dtype(torch.bfloat16)
    usual, states = state_budgets(subject, low, 2, 0)
    budgets, more = state_budgets(subject, low, 2, 0, before_norm=True)
    assert len(budgets) == len(more[0]) == len(more[1]) == len(usual) + (norm is not None)
    if norm is not None:
        module = tiny(kind).to(more[0][-1].dtype)
        for before, found in zip(more, states, strict=True):
            torch.testing.assert_close(getattr(module, norm)(before[-1]), found[-1])
