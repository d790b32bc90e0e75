"""Loading: from a name, a folder or a live module to a model that can be measured."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from lipscope._ambient import entry_point, float32_by_default, live_modules, ordinary_module
from lipscope._files import for_terminal
from lipscope._types import UserError
from lipscope.models import embedded
from lipscope.models._transformers_internals import attention_in_force, random_model
from lipscope.models.attention import configs
from lipscope.models.model import Card, Model
from lipscope.models.model_files import check_size, on_one_line
from lipscope.models.repository import OWN_TYPES, Repository, open_repository, open_tokenizer

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

FEWEST = 8
"""A file with less than this fraction of a model's weights is not that model's."""


@entry_point
def load(
    source: str | os.PathLike[str] | nn.Module | None = None,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    random_init: int | None = None,
) -> Model:
    """Load a transformers model so that its attention can be measured.

    Weights are read from safetensors only, and no code that comes with a model ever runs. A live
    module is borrowed: after every call it is exactly as its owner left it, also if several threads
    measure it at once. Training it in another thread meanwhile is not supported; see
    docs/threads.md. A module that was built under ``torch.inference_mode()`` is copied instead.

    Args:
        source: A model name on the hub, a folder, a live transformers module, or ``None`` for the
            embedded default model, all-MiniLM-L6-v2 (``"embedded"`` names it too).
        tokenizer: A tokenizer, or the name or folder of one, to use in place of the model's own.
        dtype: The dtype to measure in. Default: float64.
        device: The device to load the model to. Default: the CPU; a live module stays where it is.
        revision: A branch, tag or commit on the hub; the commit it resolves to is recorded.
        random_init: Seed for random weights in place of the trained ones, from 0.

    Returns:
        The loaded :class:`Model`.

    Raises:
        UserError: If the model cannot be found, is quantised or larger than memory, or its files
            are not usable.

    Example:
        >>> import lipscope as ls
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=4)
        >>> model = ls.load(LlamaModel(config), random_init=0)
        >>> model.layers, model.heads, model.card.dtype
        (2, 4, 'float64')
    """
    return _load(source, tokenizer, dtype, device, revision, random_init, head=False)


def load_language_model(
    source: str | os.PathLike[str] | None,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    random_init: int | None = None,
) -> Model:
    """`load` for a model that keeps the head that predicts the next token, as `with_head`."""
    return _load(source, tokenizer, dtype, device, revision, random_init, head=True)


def _load(
    source: str | os.PathLike[str] | nn.Module | None,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    revision: str | None,
    random_init: int | None,
    head: bool,
) -> Model:
    wanted = check_loading(dtype, random_init)
    with _quiet():
        reader = None
        if isinstance(source, nn.Module):
            module, name = _live(source, device, random_init)
            device = next(source.parameters()).device
        else:
            reader = _repository(source, revision, weights=random_init is None)
            module = _read(reader, random_init, wanted, head)
            name = reader.name
        owned = reader is not None or random_init is not None
        trunk, architecture = _trunk(module)
        # Hashed before casting: the hash identifies the stored weights, whatever they run in.
        with live_modules:  # another thread may have lent other weights to the module
            digest = weights_hash(trunk)
        if owned:
            # nn.Module's own `to`, without transformers' special cases for quantised models.
            whole = module if head else trunk
            nn.Module.to(whole, _device(device), wanted).eval().requires_grad_(False)
        words = _tokenizer(tokenizer, reader)
    card = Card(
        name=name,
        revision=None if reader is None else reader.revision,
        architecture=architecture,
        weights=digest,
        tokenizer=None if words is None else tokenizer_hash(words),
        random_init=random_init,
        dtype=str(wanted).removeprefix("torch."),
        device=str(next(trunk.parameters()).device),
        versions={
            "python": platform.python_version(),
            **{p.__name__: p.__version__ for p in (torch, transformers, tokenizers, safetensors)},
        },
        option=None if reader is None else _option(reader, tokenizer, random_init),
    )
    return Model(
        trunk=trunk,
        tokenizer=words,
        card=card,
        dtype=wanted,
        owned=owned,
        with_head=module if head else None,
        prefix=_prefix(module, trunk) if reader is None or head else _saved_prefix(trunk),
    )


def _option(
    repository: Repository, tokenizer: Any, random_init: int | None
) -> tuple[str, ...] | None:
    """The arguments of a command that loads this again; None if only Python can."""
    if not (tokenizer is None or isinstance(tokenizer, str | os.PathLike)):
        return None
    options = {
        "--revision": repository.revision if repository.name != embedded.NAME else None,
        "--random-init": random_init,
        "--tokenizer": None if tokenizer is None else _found_anywhere(os.fspath(tokenizer)),
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    return (_found_anywhere(repository.name), *(word for pair in given.items() for word in pair))


def _found_anywhere(name: str) -> str:
    """A name that means the same from another directory, where a folder's would be the hub's."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def weights_hash(module: nn.Module) -> str:
    """sha256 of every tensor of the module's state, by name, in its own dtype."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of everything that decides how text becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: dict[str, Any] = {
            "class": type(tokenizer).__name__,
            "vocabulary": tokenizer.get_vocab(),
        }
    else:
        content = json.loads(backend.to_str())
        # Calls change these two on the tokenizer itself; neither affects the ids lipscope asks for.
        content.pop("truncation", None)
        content.pop("padding", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _repository(source: Any, revision: str | None, weights: bool) -> Repository:
    if source is None or source in embedded.NAMES:
        if revision is not None:
            raise UserError(
                f"the embedded model has only one revision, {embedded.REVISION}; "
                f"drop revision={revision!r}"
            )
        return Repository(embedded.NAME, embedded.folder(), embedded.REVISION)
    if not isinstance(source, str | os.PathLike):
        raise UserError(
            "load takes a model name, a folder or a live transformers module, "
            f"got {type(source).__name__}"
        )
    return open_repository(os.fspath(source), revision, weights)


def _read(
    repository: Repository, random_init: int | None, dtype: torch.dtype, head: bool = False
) -> PreTrainedModel:
    """The model of a repository, or the same architecture with random weights."""
    config = repository.config()
    kinds = _model_classes(config, MODEL_FOR_CAUSAL_LM_MAPPING if head else MODEL_MAPPING)
    if head and not kinds:
        raise UserError(
            f"{repository.name} is of type {config.model_type!r}, which has no causal "
            "language-model head; choose a model that predicts the next token"
        )
    if not kinds:
        raise UserError(
            f"{repository.name} is of type {config.model_type!r}, which has no hidden states; "
            "choose a model with a transformer trunk"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = (
            quantization.get("quant_method", "unknown")
            if isinstance(quantization, dict)
            else type(quantization).__name__
        )
        if random_init is None:
            raise UserError(
                f"{repository.name} is quantised ({method}); "
                "lipscope needs its weights in floating point"
            )
        del config.quantization_config
    itemsize = max(dtype.itemsize, torch.float32.itemsize)
    expected = check_size(kinds[0], config, repository.name, itemsize)
    if random_init is not None:
        return _in_force(_random(kinds[0], config, random_init))
    model = _in_force(_with_weights(repository, kinds[0], config, expected))
    # Weights that were not in the files are NaN by now.
    empty = [key for key, p in model.named_parameters() if head and bool(p.isnan().any())]
    if empty:
        raise UserError(
            f"{repository.name} has no weights for its language-model head ({empty[0]}); "
            "use metric output"
        )
    return model


def _with_weights(
    repository: Repository, kind: Any, config: PretrainedConfig, expected: int | None
) -> PreTrainedModel:
    """A model with the weights of a repository, NaN where it has none."""
    state = repository.weights()
    for key, tensor in state.items():
        # Integers are fine in buffers, such as position ids.
        weight = tensor.is_floating_point() or key.endswith(("weight", "bias"))
        if weight and tensor.dtype not in DTYPES.values():
            raise UserError(
                f"{repository.name} has weights in {tensor.dtype} ({for_terminal(key, 80)}); "
                "lipscope needs float16 or finer"
            )
    stored = sum(tensor.numel() for tensor in state.values())
    # An encoder stored alone is about half of its model; far less than that is another model.
    if expected is not None and stored < expected / FEWEST:
        raise UserError(
            f"{repository.name} has {stored} weights in its files, and its configuration describes "
            f"{expected}: they do not belong together; download both again"
        )
    try:
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype="auto",
            attn_implementation="eager",
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below
        )
    except Exception as error:  # each model class raises its own kind of error
        raise UserError(
            f"the weights of {repository.name} do not fit its configuration ({on_one_line(error)})"
        ) from error
    for key, found, wanted in report["mismatched_keys"]:
        raise UserError(
            f"the weights of {repository.name} do not fit its configuration: "
            f"{for_terminal(key, 80)} has shape {tuple(found)}, expected {tuple(wanted)}"
        )
    for key in report["missing_keys"]:
        # transformers fills missing weights at random, and random weights must never pass for
        # trained ones. NaN shows up in the preflight; in an unused part (a pooler) it is harmless.
        model.state_dict()[key].fill_(torch.nan)
    return model


def _model_classes(
    config: PretrainedConfig, mapping: Any = MODEL_MAPPING
) -> tuple[type[PreTrainedModel], ...]:
    """The model classes that belong to a configuration; by default those without a head."""
    try:
        kinds: Any = mapping.get(type(config), ())
    except ValueError:  # transformers lists the class, but this installation lacks it
        return ()
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _random(kind: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Random weights by the model's own rule, drawn on the CPU so that a seed is portable."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), float32_by_default():
            torch.manual_seed(seed)
            return random_model(kind, config)
    except Exception as error:  # each model class raises its own kind of error
        raise UserError(
            f"{kind.__name__} cannot be built from its configuration ({on_one_line(error)})"
        ) from error


def _in_force(model: PreTrainedModel) -> PreTrainedModel:
    """The model, once it is certain that its configuration did not override what was requested."""
    attention = {attention_in_force(config) for config in configs(model)}
    home = type(model).__module__
    if attention != {"eager"} or not home.startswith(("transformers.models.", *OWN_TYPES.values())):
        raise UserError(
            f"refused to load: the model selects attention {sorted(map(str, attention))} and code "
            f"from {home}; lipscope needs eager attention and transformers' own code"
        )
    return model


def _live(
    module: nn.Module, device: str | torch.device | None, random_init: int | None
) -> tuple[PreTrainedModel, str]:
    """A live module, or one like it with random weights; and its name."""
    if not isinstance(module, PreTrainedModel):
        raise UserError(
            f"load takes transformers models, got {type(module).__name__}; "
            "for a map of your own, use local_lipschitz(f, X)"
        )
    tensors = [*module.parameters(), *module.buffers()]
    coarse = [str(t.dtype) for t in tensors if t.dtype.itemsize == 1 and t.dtype != torch.bool]
    # torchao and others keep packed numbers in a subclass of Tensor that pretends to be float32.
    coarse += [type(t.data).__name__ for t in tensors if type(t.data) is not torch.Tensor]
    # torch's own quantised layers (quantize_dynamic) keep no parameters at all.
    coarse += [
        f"{type(m).__module__}.{type(m).__name__}"
        for m in module.modules()
        if "quantized" in type(m).__module__ and type(m).__module__.startswith("torch.")
    ]
    if coarse or not tensors or any(t.is_meta for t in tensors):
        what = f"quantised or packed ({coarse[0]})" if coarse else "not loaded"
        raise UserError(
            f"the weights of this {type(module).__name__} are {what}; lipscope needs them in "
            "floating point: give the model as it was before, or dequantised"
        )
    if device is not None and module.device.type != torch.device(device).type:
        raise UserError(
            f"a live module is measured where it is, on {module.device}; "
            f"drop device={str(device)!r}, or move the module first"
        )
    known = module.config.name_or_path
    # transformers notes "None" for what was read without a name, as `_read` does it.
    name = type(module).__name__ if known in (None, "", "None") else str(known)
    if random_init is None:
        return ordinary_module(module), name
    with live_modules:  # another thread may have set it for a measurement
        config = copy.deepcopy(module.config)
    return _random(type(module), config, random_init), name


def _trunk(module: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """The part up to the last hidden state, without heads; the encoder of an encoder-decoder."""
    trunk: Any = module if type(module) in _model_classes(module.config) else module.base_model
    if not getattr(module.config, "is_encoder_decoder", False):
        return trunk, type(trunk).__name__
    encoder = module.get_encoder()
    if not isinstance(encoder, PreTrainedModel):
        raise UserError(
            f"the encoder of {type(trunk).__name__} is not a transformers model of its own, "
            "so it cannot be measured"
        )
    return encoder, f"{type(trunk).__name__} (encoder)"


def _prefix(module: PreTrainedModel, trunk: nn.Module) -> str:
    """What stands before the names of the trunk's parts in a model."""
    path = next(name for name, part in module.named_modules() if part is trunk)
    return f"{path}." if path else ""


def _saved_prefix(trunk: PreTrainedModel) -> str:
    """The prefix in the model, usually with a head, that a checkpoint was saved from."""
    saved = (getattr(trunk.config, "architectures", None) or [""])[0]
    kind = getattr(transformers, saved, None) if isinstance(saved, str) and saved else None
    if kind is None or isinstance(trunk, kind):
        return ""
    try:
        with torch.device("meta"):
            module = random_model(kind, copy.deepcopy(trunk.config))
        return _prefix(module, _trunk(module)[0])
    except Exception:  # a class that cannot be built from this configuration, or without the trunk
        return ""


def _tokenizer(given: Any, reader: Repository | None) -> Any:
    if given is None:
        return None if reader is None else reader.tokenizer()
    if isinstance(given, str | os.PathLike):
        if given in embedded.NAMES:
            return Repository(embedded.NAME, embedded.folder(), None).tokenizer()
        return open_tokenizer(os.fspath(given))
    if not callable(given) or not hasattr(given, "decode"):
        raise UserError(
            "tokenizer must be a folder, a name on the hub or a transformers tokenizer, "
            f"got {type(given).__name__}"
        )
    return given


def check_loading(given: Any, random_init: Any) -> torch.dtype:
    """The dtype to measure in, once it and the seed of random weights are known to be valid."""
    seed = isinstance(random_init, int) and not isinstance(random_init, bool)
    if random_init is not None and not (seed and 0 <= random_init < 2**63):
        raise UserError(f"random_init must be an integer from 0 to 2^63 - 1, got {random_init!r}")
    wanted = DTYPES.get(given) if isinstance(given, str) else given or torch.float64
    if wanted is None or wanted not in DTYPES.values():
        raise UserError(
            f"dtype must be one of {', '.join(DTYPES)}, got {str(given).removeprefix('torch.')!r}"
        )
    return wanted


def _device(given: str | torch.device | None) -> torch.device:
    try:
        device = torch.device("cpu" if given is None else given)
        torch.zeros(1, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {str(given)!r} cannot be used here ({on_one_line(error)}); try cpu"
        ) from error
    return device


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence logs and progress bars of transformers and the hub; errors are raised as usual."""
    hub = logging.getLogger("huggingface_hub")
    verbosity = transformers_logging.get_verbosity()
    level = hub.level
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub.setLevel(level)
        if bar:
            transformers_logging.enable_progress_bar()
