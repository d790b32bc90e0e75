"""A loaded model: its layers, its tokenizer, and the maps inside it that can be measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipscope._ambient import entry_point, live_modules, unaffected
from lipscope._types import UserError
from lipscope.models import tokenizers
from lipscope.models.capture import RecordedCall
from lipscope.models.maps import ModelRunner
from lipscope.models.scopes import SCOPES, WITHOUT_ROUTE, check_scope_names
from lipscope.models.sites import Memory, Site, Survey, record
from lipscope.models.structure import Layer, Preflight, block_calls, preflight, routed_layers

RANKS = {"inputs_embeds": 3, "pixel_values": 4}
"""Number of dimensions of an input, samples first."""

LENGTHS_FIRST = {"input_ids", "inputs_embeds"}
"""Inputs [samples, tokens, ...], which can be cut to fewer tokens."""

COMPARED = 2048
"""Maximum number of tokens on which lipscope's attention and eager attention are compared."""


@dataclass(frozen=True)
class Card:
    """What was loaded.

    weights:   sha256 of the weights, in the dtype they were stored in
    tokenizer: sha256 of the tokenizer
    option:    the command-line arguments that load the same; None if it was given as an object
    """

    name: str
    revision: str | None
    architecture: str
    weights: str
    tokenizer: str | None
    random_init: int | None
    dtype: str
    device: str
    versions: dict[str, str]
    option: tuple[str, ...] | None


class Model:
    """An unmodified transformers model and the maps inside it, as returned by :func:`load`.

    During a measurement the module runs on lipscope's attention, in evaluation mode and in `dtype`;
    between calls it is exactly as its owner left it. Several threads may use one model; see
    docs/threads.md.

    Attributes:
        trunk: The transformers module up to the last hidden state, without task heads.
        tokenizer: The tokenizer, or None.
        card: What was loaded: name, revision, hashes, dtype, device, versions.
        dtype: The dtype measurements are made in.
        with_head: The module with the head that predicts the next token, if it was loaded.
        prefix: What stands before the names of the trunk's parts in the whole model, such as
            "model.": the live model that was given, or the one that the weights were saved from.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=4)
        >>> model = ls.load(LlamaModel(config), random_init=0)
        >>> sites = model.sites(torch.arange(8), scopes=["attention"])
        >>> [(site.layer, tuple(site.X.shape)) for site in sites]
        [(0, (1, 8, 32)), (1, (1, 8, 32))]
        >>> estimate = ls.local_lipschitz(sites[0].f, sites[0].X[0])
        >>> estimate.lower <= estimate.value <= estimate.upper
        True
    """

    def __init__(
        self,
        trunk: PreTrainedModel,
        tokenizer: Any,
        card: Card,
        dtype: torch.dtype,
        owned: bool,
        with_head: PreTrainedModel | None = None,
        prefix: str = "",
    ):
        self.trunk = trunk
        self.tokenizer = tokenizer
        self.card = card
        self.dtype = dtype
        self.with_head = with_head
        self.prefix = prefix
        self._owned = owned
        self._runner = ModelRunner(trunk, dtype, owned)
        try:
            self._text_config: Any = trunk.config.get_text_config()
        except ValueError:  # several parts read tokens
            self._text_config = trunk.config
        # Preflights by input shape: a model may route attention differently at another length.
        self._checks: dict[tuple[Any, ...], Preflight] = {}
        self._layers: list[Layer] | None = None
        self._memory: Memory = {}

    def __repr__(self) -> str:
        card = self.card
        kind = "" if card.name == card.architecture else f"{card.architecture}, "
        seed = "" if card.random_init is None else f", random weights (seed {card.random_init})"
        return f"Model({card.name}: {kind}{card.dtype} on {card.device}{seed})"

    @property
    def owned(self) -> bool:
        """Whether lipscope loaded the module itself; a live one is borrowed and has no name."""
        return self._owned

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.trunk.parameters()).device

    @property
    @unaffected
    def preflight(self) -> Preflight:
        """The comparison with eager attention that has differed most so far."""
        with live_modules:
            if not self._checks:
                self._prepare(self._sample_input())
        return max(self._checks.values(), key=lambda check: (not check.routed, check.difference))

    @property
    @unaffected
    def layers(self) -> int:
        """The number of layers; of a hybrid, its blocks without attention included."""
        return len(self._known_layers())

    @property
    @unaffected
    def attending(self) -> tuple[int, ...]:
        """The numbers of the layers that can be measured: all but those without attention."""
        return tuple(i for i, layer in enumerate(self._known_layers()) if layer.attends)

    @property
    @unaffected
    def heads(self) -> int:
        """The number of heads of the widest layer; 0 if heads cannot be measured one by one."""
        return max(layer.heads for layer in self._known_layers())

    @property
    def max_positions(self) -> int | None:
        """The longest input the model has positions for; None if there is no limit."""
        limit = getattr(self._text_config, "max_position_embeddings", None)
        if not isinstance(limit, int) or limit <= 0:  # XLNet says -1 for no limit
            return None
        for module in self.trunk.modules():
            # RoBERTa counts its positions from padding_idx + 1.
            if (
                isinstance(module, nn.Embedding)
                and module.num_embeddings == limit
                and module.padding_idx is not None
            ):
                return limit - module.padding_idx - 1
        return limit

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """The token ids of a text."""
        return tokenizers.encode(self._need_tokenizer(), text, special_tokens, self.card.name)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return tokenizers.decode(self._need_tokenizer(), ids, self.card.name)

    @entry_point
    def sites(
        self,
        input_ids: Tensor | Sequence[Any] | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        inputs: Mapping[str, Any] | None = None,
        scopes: Sequence[str] = ("heads", "attention"),
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> list[Site]:
        """The maps to measure, with their inputs, from one forward pass.

        Args:
            input_ids: Token ids [B, n] or [n].
            inputs_embeds: Embeddings [B, n, d], in place of token ids.
            pixel_values: Images [B, c, h, w], for vision models.
            inputs: All arguments of the model by name, samples first, for models that read
                something else (sound, for instance) or need more than one input.
            scopes: The maps to take at each layer; see docs/scopes.md.
            layers: Layer numbers, from 0: those of the model's blocks. Default: all layers with
                attention.
            heads: Head numbers, for the scope heads. Default: all heads.

        Returns:
            One :class:`Site` per layer and scope. A site of the scope heads is a batch over samples
            and heads.
        """
        survey = self.survey(
            input_ids, inputs_embeds=inputs_embeds, pixel_values=pixel_values, inputs=inputs
        )
        self.check_scopes(scopes)
        chosen = self.attending if layers is None else layers
        self.check_layers(chosen, self.card.architecture)
        self.check_heads(heads, chosen)
        whole = [scope for scope in scopes if SCOPES[scope].per == "model"]
        within = [
            survey.site(scope, i, heads) for i in chosen for scope in scopes if scope not in whole
        ]
        return within + [survey.site(scope) for scope in whole]

    @entry_point
    def survey(
        self,
        input_ids: Tensor | Sequence[Any] | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Survey:
        """Run one forward pass, from which sites can be taken one by one."""
        given = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
            "inputs": inputs,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise UserError(
                "give one of input_ids, inputs_embeds, pixel_values and inputs, "
                f"got {', '.join(given) or 'none'}"
            )
        whole = self._call(given if inputs is None else inputs)
        single = whole.of_first()
        with live_modules:
            self._prepare(single)
            runner = self._runner
            if not self.preflight.routed:
                runner = replace(runner, implementation="eager")
            if len(whole.hidden) > 1:
                whole = replace(whole, single=single)
            return record(runner, self._known_layers(), whole, self._memory)

    def check_scopes(self, scopes: Sequence[str]) -> None:
        """Raise UserError for a scope that does not exist, or not for this model."""
        check_scope_names(scopes)
        for scope in scopes:
            if SCOPES[scope].last and not self.preflight.hidden:
                raise UserError(
                    f"{self.card.architecture} returns no hidden states, so scope {scope} is not "
                    "available; use block"
                )
            if SCOPES[scope].routed and not self.preflight.routed:
                raise UserError(
                    f"{self.preflight.reason}, so scope {scope} is not available; "
                    f"use scope {', '.join(WITHOUT_ROUTE[:-1])} or {WITHOUT_ROUTE[-1]}"
                )

    def check_layers(self, layers: Iterable[int], name: str) -> None:
        """Raise UserError for a layer number that the model `name` does not have or cannot use."""
        for i in layers:
            if not 0 <= i < self.layers:
                raise UserError(
                    f"layer {i} does not exist: {name} has layers 0 to {self.layers - 1}"
                )
            if i not in self.attending:
                raise UserError(
                    f"layer {i} of this model has no attention; the layers with attention are "
                    f"{', '.join(map(str, self.attending))}"
                )

    def check_heads(self, heads: Sequence[int] | None, layers: Sequence[int]) -> None:
        """Raise UserError for a head number that one of the layers does not have."""
        for i in layers:
            count = self._known_layers()[i].heads
            for head in heads or ():
                if not 0 <= head < count:
                    raise UserError(
                        f"head {head} does not exist: layer {i} has heads 0 to {count - 1}"
                    )

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Raise UserError for inputs that the model cannot read, token ids above all."""
        self._call(inputs)

    def _call(self, inputs: Mapping[str, Any]) -> RecordedCall:
        """The call of the trunk with these arguments, checked, on its device and in its dtype."""
        if not isinstance(inputs, Mapping) or not inputs:
            raise UserError(
                "inputs must map the names of the model's arguments to tensors, "
                f"got {type(inputs).__name__}"
            )
        kwargs = {name: self._argument(name, value) for name, value in inputs.items()}
        tensors = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        if not tensors:
            raise UserError(f"inputs must contain a tensor, got {', '.join(map(repr, inputs))}")
        main = self.trunk.main_input_name
        return RecordedCall((), kwargs, main=main if main in tensors else tensors[0])

    def _argument(self, name: str, value: Any) -> Any:
        if name == "input_ids":
            value = torch.as_tensor(value)
            if value.dtype.is_floating_point or value.ndim not in (1, 2) or value.numel() == 0:
                raise UserError(
                    "input_ids must be integers [B, n] or [n], "
                    f"got {value.dtype} {tuple(value.shape)}"
                )
            value = value.long() if value.ndim == 2 else value.long()[None]
            count = getattr(self._text_config, "vocab_size", None)
            # A model may hash its ids (CANINE): only a table of this very size tells.
            table = any(
                isinstance(module, nn.Embedding) and module.num_embeddings == count
                for module in self.trunk.modules()
            )
            low = int(value.min())
            high = int(value.max())
            if table and count is not None and not 0 <= low <= high < count:
                raise UserError(
                    f"token id {low if low < 0 else high} is not in the vocabulary of "
                    f"{self.card.name}, 0 to {count - 1}; "
                    "was the text encoded with its own tokenizer?"
                )
        elif name in RANKS:
            if not isinstance(value, Tensor) or value.ndim not in (RANKS[name] - 1, RANKS[name]):
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UserError(
                    f"{name} must have {RANKS[name]} dimensions, samples first, got {found}"
                )
            value = value[None] if value.ndim < RANKS[name] else value
        if not isinstance(value, Tensor):
            return value
        limit = self.max_positions if name in ("input_ids", "inputs_embeds") else None
        if limit is not None and value.shape[1] > limit:
            raise UserError(
                f"{value.shape[1]} tokens are more than the {limit} positions of "
                f"{self.card.name}; give a shorter input"
            )
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def _prepare(self, single: RecordedCall) -> None:
        """Run the preflight for inputs of this shape; the first time, also find the layers."""
        # Eager attention needs n^2 memory, so only the first tokens of a long text are compared.
        if single.kwargs.keys() <= LENGTHS_FIRST and single.hidden.shape[1] > COMPARED:
            single = single.at(single.hidden[:, :COMPARED])
        shape = tuple((name, getattr(x, "shape", x)) for name, x in single.kwargs.items())
        if shape not in self._checks:
            new = self._layers is None
            check, events = preflight(self._runner, single, self.trunk.modules() if new else ())
            if new:
                if check.routed:
                    self._layers = routed_layers(self.trunk, events)
                else:  # the blocks of a model with its own attention code
                    runner = replace(self._runner, implementation="eager")
                    with torch.no_grad(), runner.ready():
                        blocks, _ = block_calls(self.trunk, lambda: runner.run(self.trunk, single))
                    self._layers = [Layer(block, None, 0) for block in blocks]
                if not self._layers:
                    raise UserError(
                        f"{check.reason}, and lipscope cannot find its blocks: "
                        "the model cannot be measured"
                    )
            elif check.routed != self.preflight.routed:
                raise UserError(f"at {check.n} tokens: {check.reason}")
            self._checks[shape] = check

    def _known_layers(self) -> list[Layer]:
        with live_modules:
            if self._layers is None:
                self._prepare(self._sample_input())
        assert self._layers is not None
        return self._layers

    def _sample_input(self) -> RecordedCall:
        """A short random input, for finding the layers before there is a real one."""
        config = self.trunk.config
        generator = torch.Generator().manual_seed(0)
        kind = self.trunk.main_input_name
        if kind == "pixel_values":
            size = getattr(config, "image_size", 224)
            height, width = size if isinstance(size, tuple | list) else (size, size)
            shape = (1, getattr(config, "num_channels", 3), height, width)
            pixels = torch.randn(shape, generator=generator, dtype=torch.float32)
            return self._call({"pixel_values": pixels})
        if kind != "input_ids":
            # A model with several main inputs (OneFormer) has a list of names.
            names = [kind] if isinstance(kind, str) else list(kind)
            given = ", ".join(f"{name!r}: tensor" for name in names)
            raise UserError(
                f"{self.card.architecture} reads {' and '.join(names)}, not tokens; in Python, "
                f"give it what it reads: load(...).sites(inputs={{{given}, ...}})"
            )
        n = min(8, self.max_positions or 8)
        vocabulary = getattr(self._text_config, "vocab_size", 256)
        return self._call({"input_ids": torch.randint(vocabulary, (1, n), generator=generator)})

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise UserError(
                f"{self.card.name} has no tokenizer; "
                "pass one to load (--tokenizer DIR in a command), or give token ids instead of text"
            )
        return self.tokenizer
