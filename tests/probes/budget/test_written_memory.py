"""Errors of what is written into memory that was there before: empty, views, out, in place."""

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3Model,
    Gemma2Config,
    Gemma2Model,
    MiniCPM3Config,
    MiniCPM3Model,
    MiniMaxConfig,
    MiniMaxModel,
)

import lipscope as ls
from lipscope._types import UserError
from lipscope.probes.budget.rounding import follow_run, squared_errors
from lipscope.probes.budget.subject import read_subject

IDS = torch.arange(24).reshape(2, 12)


class Around(nn.Module):
    """A function between two linear layers."""

    def __init__(self, f):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(60, 32)
        self.a = nn.Linear(32, 32)
        self.b = nn.Linear(32, 32)
        self.f = f

    def forward(self, ids):
        x = self.embed(ids)
        return self.b(self.f(self.a(x))) + x


def empty_then_views(x):
    y = x.new_empty(x.shape)
    y[..., :16].copy_(x[..., :16] * 1.1)
    y[..., 16:] = x[..., 16:] * 1.3
    return y


def empty_like_out(x):
    y = torch.empty_like(x)
    torch.mul(x, 1.1, out=y)
    torch.sin(x[..., :7], out=y[..., 3:10])
    return y


def empty_strided(x):
    y = torch.empty_strided(x.shape, (x[0].numel(), 1, x.shape[1]), dtype=x.dtype)
    return y.copy_(x * 1.1)


def resized(x):
    y = torch.empty(0, dtype=x.dtype).resize_(x.shape).copy_(x * 1.1)
    y.resize_(1, 6, 32).mul_(1.3)
    y.resize_(x.shape)[:, 6:] = x[:, 6:]
    return y


def out_of_another_size(x):
    return torch.mul(x, 1.1, out=torch.empty(0, dtype=x.dtype))


def partly_unused(x):
    y = x.new_empty(2, *x.shape)
    y[1] = x * 1.1
    return y[1]


def not_a_number_before(x):
    y = torch.full_like(x, torch.nan)
    for i in range(32):
        y[..., i] = x[..., i] * (1 + i / 32)
    return y


def base_of_a_view(x):
    y = x * 1.1
    y.transpose(1, 2)[:, :16].tanh_()
    return y


def view_of_a_base(x):
    y = x * 1.1
    half = y[..., :16]
    y += 0.3 * x
    return torch.cat([half, y], dim=-1)[..., 8:40]


def neighbours(x):
    a, b = x.clone().chunk(2, dim=-1)
    a.mul_(1.1)
    b.add_(a * 1.3)
    return torch.cat([b, a], dim=-1)


def indexed(x):
    y = torch.zeros(x.shape, dtype=x.dtype)
    y.index_put_((torch.tensor([0]),), x * 1.1)
    y.index_add_(2, torch.arange(32).flip(0), x * 0.7)
    y.masked_fill_(torch.arange(32) == 4, 0.1)
    y[:, 1:3].scatter_add_(2, torch.zeros(1, 2, 1, dtype=torch.long), x[:, :2, :1] * 0.3)
    return y


def in_place_by_argument(x):
    y = x * 1.1
    nn.functional.relu(y[..., :9], inplace=True)
    nn.functional.leaky_relu(y.view(-1), 0.3, True)
    return y


def many_at_once(x):
    y = [x * 1.1, x * 1.2]
    torch._foreach_mul_(y, 1.3)
    return y[0] + y[1]


def without_a_graph(x):
    with torch.no_grad():
        y = (x * 1.1).sin()
    z = y.detach() * 1.3
    z.data.mul_(0.7)
    return z


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 1.1
        y[..., :3].mul_(1.3)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


def complex_numbers(x):
    wide = x if x.dtype == torch.float64 else x.float()
    c = torch.view_as_complex(wide.unflatten(-1, (16, 2)))
    c = c * torch.exp(0.5j * c.real)
    c.mul_(1.1)
    return torch.view_as_real(c).flatten(2).to(x.dtype)


def also_used_unrounded(x):
    """A cast is nothing in the reference, but only what is behind it has its error."""
    wide = x * 1.1 if x.dtype == torch.float64 else x.float() * 1.1
    return wide.to(x.dtype) + (wide * 0.7).to(x.dtype)


def drawn_at_random(x):
    return x * 1.1 + 0 * torch.empty_like(x).uniform_()


def rounded_constants(x):
    return x * torch.tensor(1 / 3, dtype=x.dtype) + torch.arange(4099, 4131).to(x.dtype) / 4096


PATTERNS = [
    empty_then_views,
    empty_like_out,
    empty_strided,
    resized,
    out_of_another_size,
    partly_unused,
    not_a_number_before,
    base_of_a_view,
    view_of_a_base,
    neighbours,
    indexed,
    in_place_by_argument,
    many_at_once,
    without_a_graph,
    InPlace.apply,
    complex_numbers,
    also_used_unrounded,
    drawn_at_random,
    rounded_constants,
]


@pytest.mark.parametrize("f", PATTERNS, ids=lambda f: getattr(f, "__name__", "?"))
def test_errors_of_what_was_written_add_up_to_the_error_of_the_run(f):
    """To first order, <v, dy> is the sum of <g, e>, and the reference is a run in float64."""
    subject = read_subject(Around(f), IDS, head=False, length=64, samples=1)
    run = follow_run(subject, subject.in_dtype(torch.float16), subject.sequences[0])
    with torch.no_grad():
        exact = Around(f).double()(IDS[:1])
    assert (run.output - exact).norm() <= 1e-12 * exact.norm()
    dy = run.run[0].double() - exact
    v = torch.randn(5, *dy.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    linear = squared_errors([run.output], [v], run.roundings)[1].sum(dim=1)
    assert torch.all((linear - (v * dy).flatten(1).sum(dim=1)).abs() <= 0.01 * dy.norm())


def test_an_argument_changed_behind_the_back_is_refused():
    def renormalise(x):
        return nn.functional.embedding(torch.arange(12)[None], x[0].clone(), max_norm=0.1)

    with pytest.raises(UserError, match="embedding changes one of its arguments"):
        ls.error_budget(Around(renormalise), IDS, formats="bf16")


SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
LATENT = {
    **SMALL,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    # Keys are copied into empty memory.
    "deepseek_v3": (DeepseekV3Model, DeepseekV3Config, {**LATENT, "first_k_dense_replace": 2}),
    "minicpm3": (MiniCPM3Model, MiniCPM3Config, LATENT),
    # Embeddings times a tensor of dimension 0.
    "gemma2": (Gemma2Model, Gemma2Config, {**SMALL, "head_dim": 8}),
    # Buffers that a model in bfloat16 keeps in bfloat16.
    "minimax": (MiniMaxModel, MiniMaxConfig, {**SMALL, "head_dim": 8, "num_local_experts": 1}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_budgets_of_families_with_such_memory(name, tmp_path):
    kind, config, sizes = FAMILIES[name]
    torch.manual_seed(0)
    model = kind(config(**sizes, num_experts_per_tok=1))
    budget = ls.error_budget(model, IDS, formats="bf16", observe=True)
    assert 0.8 <= budget.observed["bf16"] / budget.total("bf16").value <= 1.25
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    low = read_subject(model, IDS, head=False, length=9, samples=1).in_dtype(torch.bfloat16)
    assert {n: b.dtype for n, b in low.module.named_buffers()} == {
        n: b.dtype for n, b in loaded.named_buffers()
    }


def test_a_model_that_has_no_run_in_the_format_is_refused():
    class Fourier(Around):
        def forward(self, ids):
            return torch.fft.fft(self.embed(ids)).real

    with pytest.raises(UserError, match="Fourier does not run in bfloat16"):
        ls.error_budget(Fourier(None), IDS, formats="bf16")
