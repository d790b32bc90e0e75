"""The character models of `lipscope train`, as an architecture that transformers knows and lipscope can measure."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lipscope.attention.layer import SelfAttention
from lipscope.charlm.folder import MODEL_TYPE, NAMES, config_fields
from lipscope.charlm.language_model import (
    Architecture,
    CharacterTransformer,
    make_attention,
    norm_in_words,
)
from lipscope.nn.attention_layer import AttentionLayer
from lipscope.nn.cosine_attention import CosineSelfAttention
from lipscope.nn.dot_attention import DotSelfAttention
from lipscope.nn.l2_attention import ContractiveL2Attention, L2SelfAttention

SMALLEST = Architecture(2, width=8, depth=1, heads=1, context=8)
"""What a configuration is that says nothing: transformers makes one to compare others with."""


class CharacterConfig(PretrainedConfig):
    """An Architecture, its sizes by transformers' names."""

    model_type = MODEL_TYPE
    attribute_map = NAMES

    def __init__(
        self, **held: Any
    ) -> None:  # fields of an architecture, and what every configuration may hold
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
    """An attention layer that asks transformers which attention function to use, as its own models do."""

    config: PretrainedConfig

    def forward(self, X: Tensor) -> Tensor:  # type: ignore[override]  # windows of characters have no padding
        q, k, v = self.project(X)
        mask = create_causal_mask(self.config, X, attention_mask=None, past_key_values=None)
        name = self.config._attn_implementation
        attend = eager if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]
        heads, _ = attend(self, q, k, v, mask, scaling=1.0)
        return self.out(heads.flatten(-2))

    def closed_heads(self, n: int) -> SelfAttention:
        """The heads before the output projection, in closed form."""
        return replace(self.as_map(n), O=None)


class RoutedDot(DotSelfAttention, Routed):
    """Dot-product attention on the attention function in force."""


class RoutedL2(L2SelfAttention, Routed):
    """L2 attention on the attention function in force."""


class RoutedCosine(CosineSelfAttention, Routed):
    """Cosine attention on the attention function in force."""


class RoutedContractive(ContractiveL2Attention, Routed):
    """Contractive L2 attention on the attention function in force; its scale is in the values."""


ROUTED = {
    kind.__bases__[0]: kind for kind in (RoutedDot, RoutedL2, RoutedCosine, RoutedContractive)
}
"""The routed class of each layer that make_attention gives."""


class CharacterModel(PreTrainedModel):
    """Character numbers to the last hidden state, of the same weights that were trained."""

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
        """One of token ids [B, n] and embeddings [B, n, d], which have their positions in them."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.network.embed(input_ids)
        return BaseModelOutput(
            last_hidden_state=self.network.norm(self.network.trunk(inputs_embeds))
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Every layer has drawn its own weights when it was made."""

    def _routed(self, architecture: Architecture) -> AttentionLayer:
        """The layer of the table, told to ask for its attention function."""
        layer = make_attention(architecture)
        layer.__class__ = ROUTED[type(layer)]
        assert isinstance(layer, Routed)
        layer.config = self.config
        return layer


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention spelled out, to hold lipscope's against."""
    scores = scaling * query @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return (weights @ value).transpose(1, 2), weights


AutoConfig.register(CharacterConfig.model_type, CharacterConfig)
AutoModel.register(CharacterConfig, CharacterModel)
