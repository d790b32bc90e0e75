"""The character model as a transformers architecture, which lipscope can load and measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lipscope.attention.layer import SelfAttention
from lipscope.nn.attention_layer import AttentionLayer, CosineSelfAttention, DotSelfAttention
from lipscope.nn.contractive import ContractiveL2Attention
from lipscope.nn.l2_attention import BALL, BallL2Attention, L2SelfAttention
from lipscope.papers.charlm.files import MODEL_TYPE, NAMES, config_fields
from lipscope.papers.charlm.language_model import Architecture, CharacterTransformer, norm_in_words

SMALLEST = Architecture(2, width=8, depth=1, heads=1, context=8)
"""The default configuration: transformers constructs one without arguments for comparison."""


class CharacterConfig(PretrainedConfig):
    """An Architecture as a configuration, with the names that transformers uses."""

    model_type = MODEL_TYPE
    attribute_map = NAMES

    # Keywords are fields of an Architecture, and whatever any configuration may hold.
    def __init__(self, **held: Any) -> None:
        for name, default in config_fields(SMALLEST).items():
            value = held.pop(name, default)
            setattr(self, name, norm_in_words(value) if name == "norm" else value)
        super().__init__(**held)

    @property
    def architecture(self) -> Architecture:
        return Architecture(
            **{field.name: getattr(self, field.name) for field in fields(Architecture)}
        )

    @staticmethod
    def of(a: Architecture) -> CharacterConfig:
        return CharacterConfig(**config_fields(a))


class Routed(AttentionLayer):
    """An attention layer that calls the attention function which its configuration selects.

    It comes before AttentionLayer in the MRO of the classes below, so its forward wins.
    """

    config: PretrainedConfig

    # Windows of characters have no padding.
    def forward(self, X: Tensor) -> Tensor:  # type: ignore[override]  # no padding argument
        q, k, v = self.project(X)
        # transformers builds the mask, because its form depends on the attention function.
        mask = create_causal_mask(self.config, X, attention_mask=None, past_key_values=None)
        name = self.config._attn_implementation
        attend = eager if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]
        heads, _ = attend(self, q, k, v, mask, scaling=1.0)
        return self.out(heads.flatten(-2))

    def closed_heads(self, n: int) -> SelfAttention:
        """The heads before the output projection, as a map with a closed-form Jacobian."""
        return replace(self.as_map(n), O=None)


class RoutedDot(DotSelfAttention, Routed):
    """Dot-product attention on the selected attention function."""


class RoutedL2(L2SelfAttention, Routed):
    """L2 attention on the selected attention function."""


class RoutedBall(BallL2Attention, Routed):
    """L2 attention of projected queries on the selected attention function."""


class RoutedCosine(CosineSelfAttention, Routed):
    """Cosine attention on the selected attention function."""


class RoutedContractive(ContractiveL2Attention, Routed):
    """Contractive L2 attention on the selected attention function; the values carry its scale."""


ROUTED: dict[str, Callable[[Architecture], Routed]] = {
    "dot": lambda a: RoutedDot(a.width, a.heads, causal=True),
    "l2": lambda a: RoutedL2(a.width, a.heads, causal=True),
    "cosine": lambda a: RoutedCosine(a.width, a.heads, causal=True),
    "ball": lambda a: RoutedBall(a.width, a.heads, causal=True),
    "contractive": lambda a: RoutedContractive(a.width, a.heads, a.constant, causal=True),
    "contractive-ball": lambda a: RoutedContractive(
        a.width, a.heads, a.constant, causal=True, ball=BALL
    ),
}
"""What make_attention makes, by the same names, routed."""


class CharacterModel(PreTrainedModel):
    """Character indices to the last hidden state, with the trained weights."""

    config_class = CharacterConfig
    main_input_name = "input_ids"
    _supports_attention_backend = True
    _supports_sdpa = False

    def __init__(self, config: CharacterConfig) -> None:
        super().__init__(config)
        self.network = CharacterTransformer(config.architecture, self._routed)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **unused: Any
    ) -> BaseModelOutput:
        """Takes token ids [B, n], or embeddings [B, n, d] that include positions."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.network.embed(input_ids)
        return BaseModelOutput(
            last_hidden_state=self.network.norm(self.network.trunk(inputs_embeds))
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: every layer initialises its own weights in its constructor."""

    def _routed(self, architecture: Architecture) -> AttentionLayer:
        layer = ROUTED[architecture.attention](architecture)
        layer.config = self.config
        return layer


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention written out, as a reference for lipscope's."""
    scores = scaling * query @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return (weights @ value).transpose(1, 2), weights


AutoConfig.register(CharacterConfig.model_type, CharacterConfig)
AutoModel.register(CharacterConfig, CharacterModel)
