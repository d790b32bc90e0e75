"""The models of the benchmark of error budgets, correct ports of them, and ports with bugs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import lipscope as ls


def make(name: str, context: int, tiny: bool) -> Any:
    """An untrained model over bytes."""
    import transformers

    width, depth = (32, 2) if tiny else (256, 4)
    torch.manual_seed(0)
    if name.startswith("char"):
        from lipscope.papers.charlm.language_model import Architecture
        from lipscope.papers.charlm.pretrained import CharacterConfig, CharacterModel

        kind = name.removeprefix("char_")
        return CharacterModel(
            CharacterConfig.of(
                Architecture(
                    256, attention=kind, depth=depth, width=width, heads=4, context=context
                )
            )
        )
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=256, n_embd=width, n_layer=depth, n_head=4, n_positions=context,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[name]
    config = config_class(
        vocab_size=256, hidden_size=width, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width // 4, intermediate_size=3 * width,
        max_position_embeddings=context, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return model_class(config)


def rounded(module: Any, dtype: torch.dtype, attention: str = "eager") -> nn.Module:
    """A port: the module with its parameters in `dtype`, as a loader would make it."""
    port = copy.deepcopy(module.trunk if isinstance(module, ls.Model) else module)
    for parameter in port.parameters():
        parameter.data = parameter.data.to(dtype)
    for buffer in port.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    if hasattr(port, "config"):
        port.config._attn_implementation = attention
    return port


class TanhGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x, approximate="tanh")


class Relu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def bugs_of(name: str, port: Any) -> Iterator[tuple[str, int | None, Callable[[Any], None]]]:
    """Planted bugs: a name, the layer they are in, and what plants them."""
    first, middle, last = 0, 1, len(blocks_of(port)) - 1

    def scale(path: str, factor: float) -> Callable[[Any], None]:
        return lambda block: block.get_submodule(path).weight.data.mul_(factor)

    def attribute(path: str, key: str, value: Any) -> Callable[[Any], None]:
        return lambda block: setattr(block.get_submodule(path), key, value)

    def swap(path: str, dim: int) -> Callable[[Any], None]:
        def plant(block: Any) -> None:
            W = block.get_submodule(path).weight
            k = W.shape[dim] // 4
            order = [*range(k, 2 * k), *range(k), *range(2 * k, W.shape[dim])]
            W.data = W.data.index_select(dim, torch.tensor(order, device=W.device))

        return plant

    def no_bias(path: str) -> Callable[[Any], None]:
        return lambda block: block.get_submodule(path).bias.data.zero_()

    def no_mask(path: str) -> Callable[[Any], None]:
        def drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "attention_mask": None}

        return lambda block: block.get_submodule(path).register_forward_pre_hook(
            drop, with_kwargs=True
        )

    gpt2 = name == "gpt2"
    out, up, down = (
        ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        if gpt2
        else ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    )
    attention, norm, after = (
        ("attn", "ln_1", "ln_2")
        if gpt2
        else ("self_attn", "input_layernorm", "post_attention_layernorm")
    )
    eps = "eps" if gpt2 else "variance_epsilon"
    activation = "act" if gpt2 else "act_fn"
    for layer in (first, middle, last):
        yield f"output projection off by 5 %, layer {layer}", layer, scale(out, 1.05)
        yield f"down projection off by 1.5 %, layer {layer}", layer, scale(down, 1.015)
        yield f"heads swapped, layer {layer}", layer, swap(out, 0 if gpt2 else 1)
        yield f"norm weight off by 2 %, layer {layer}", layer, scale(norm, 1.02)
        yield f"wrong eps, layer {layer}", layer, attribute(after, eps, 1e-1)
    yield "another activation", middle, attribute("mlp", activation, Relu())
    yield "tanh GELU", middle, attribute("mlp", activation, TanhGelu())
    yield (
        "scores off by 1.5 %",
        middle,
        lambda block: setattr(
            block.get_submodule(attention),
            "scaling",
            block.get_submodule(attention).scaling * 1.015,
        ),
    )
    yield "missing mask", middle, no_mask(attention)
    yield "scores not scaled", middle, attribute(attention, "scaling", 1.0)
    if gpt2:
        yield "dropped bias", middle, no_bias(down)
        yield "dropped bias of attention", middle, no_bias("attn.c_attn")
    else:
        yield "up projection transposed in blocks", middle, swap(up, 0)
        yield "key and value heads swapped", middle, swap("self_attn.v_proj", 0)


def blocks_of(port: Any) -> Any:
    return port.h if hasattr(port, "h") else port.layers


def model_bugs(name: str) -> list[tuple[str, Callable[[Any], None]]]:
    """Bugs of the whole model, which start at the first layer."""
    if name == "gpt2":
        return [("positions shifted by one", lambda m: _shift(m.wpe.weight))]
    return [
        ("wrong RoPE base", lambda m: m.rotary_emb.inv_freq.data.pow_(1.1)),
        ("embedding off by 2 %", lambda m: m.embed_tokens.weight.data.mul_(1.02)),
    ]


def _shift(weight: Tensor) -> None:
    weight.data = weight.data.roll(1, dims=0)
