"""Read a model repository, on the hub or on disk, without running any of its code."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from lipscope._files import for_terminal
from lipscope._types import UserError
from lipscope.models._transformers_internals import CONFIG_MAPPING
from lipscope.models.model_files import (
    check_numbers,
    checked_file,
    memory_here,
    on_one_line,
    read_json,
    size_of,
)
from lipscope.models.tokenizers import REMEDY, check_lines, check_tokenizer

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

OWN_TYPES = {"lipscope_character": "lipscope.papers.charlm.pretrained"}
"""lipscope's own model types and the modules that register them, imported on demand."""

FORBIDDEN = (
    "auto_map",
    "custom_pipelines",
    "attn_implementation",
    "experts_implementation",
    "use_kernels",
    "kernel_config",
    "fusion_config",
    "transformers_weights",
    "distributed_config",
    "trust_remote_code",
)
"""Prefixes, after any underscores, of config entries that select code to run or files to read."""


@dataclass(frozen=True)
class Repository:
    """The files of a model; `revision` is the commit they come from, None for a plain folder."""

    name: str
    folder: Path
    revision: str | None

    def config(self) -> PretrainedConfig:
        """The scrubbed configuration, as one of transformers' own classes."""
        raw = scrub(read_json(self.folder / "config.json", self.name))
        kind = raw.pop("model_type", None)
        if not isinstance(kind, str) or (kind not in OWN_TYPES and kind not in CONFIG_MAPPING):
            raise UserError(
                f"{self.name} is of type {for_terminal(repr(kind), 60)}, which this version of "
                "transformers does not contain, and lipscope never runs code that comes with a "
                "model; update transformers, or choose another model"
            )
        if kind in OWN_TYPES:
            import_module(OWN_TYPES[kind])  # importing it registers the type with transformers
        check_numbers(raw, self.name)
        try:
            return CONFIG_MAPPING[kind].from_dict(raw)
        except Exception as error:  # each configuration class raises its own kind of error
            raise UserError(
                f"{self.name}: config.json does not describe a {kind} model ({on_one_line(error)})"
            ) from error

    def weights(self) -> dict[str, Tensor]:
        """All tensors, from safetensors files only."""
        files = [self.folder / name for name in self._weight_files()]
        memory = memory_here()
        stored = sum(checked_file(path, self.name, limit=memory).stat().st_size for path in files)
        if stored > memory:
            raise UserError(
                f"the weights of {self.name} have {size_of(stored)}, more than the "
                f"{size_of(memory)} of memory here; choose a smaller model"
            )
        try:
            return {key: tensor for path in files for key, tensor in load_file(path).items()}
        except Exception as error:
            raise UserError(
                f"{self.name}: its safetensors files cannot be read ({on_one_line(error)}); "
                "download them again"
            ) from error

    def _weight_files(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if (self.folder / "model.safetensors").exists():
            return ["model.safetensors"]
        shards = read_json(index, self.name).get("weight_map", {}) if index.exists() else {}
        names = list(shards.values()) if isinstance(shards, dict) else [shards]
        # An index comes from the repository: it must not point outside the folder or at a pickle.
        foreign = [
            name
            for name in names
            if not isinstance(name, str)
            or not fnmatch(name, "model*.safetensors")
            or Path(name).name != name
        ]
        if foreign:
            raise UserError(
                f"{self.name}: {index.name} names {for_terminal(repr(foreign[0]), 60)}, "
                "expected files such as model-00001-of-00002.safetensors in the same folder"
            )
        if names:
            return sorted(set(names))
        others = [path.name for path in self.folder.iterdir()]
        if any(fnmatch(name, pattern) for name in others for pattern in PICKLES):
            raise UserError(
                f"{self.name} has only pickled weights, which can run code when they are read; "
                "if you trust them, write safetensors with transformers (save_pretrained), or use "
                "random_init"
            )
        if any(name.endswith(".gguf") for name in others):
            raise UserError(
                f"{self.name} has only GGUF weights, which are quantised; lipscope needs the "
                "safetensors files they were made from"
            )
        raise UserError(
            f"{self.name}: expected weights in model.safetensors or its shards, got none; "
            "save the model with save_pretrained, or use random_init"
        )

    def tokenizer(self) -> Any:
        """The tokenizer, or None; transformers sees only the files that describe one."""
        files = [
            path
            for path in self.folder.iterdir()
            if any(fnmatch(path.name, pattern) for pattern in TOKENIZER)
        ]
        if not files:
            return None
        if (self.folder / "config.json").exists():
            files.append(self.folder / "config.json")
        try:
            # AutoTokenizer follows what config files name, so it gets scrubbed copies of them.
            with tempfile.TemporaryDirectory() as clean:
                for path in files:
                    checked_file(path, self.name)
                    if path.suffix != ".json":
                        if check_lines(path, self.name):
                            shutil.copyfile(path, Path(clean) / path.name)
                        elif not (self.folder / "tokenizer.json").exists():
                            raise UserError(
                                f"{self.name}: {for_terminal(path.name, 100)} is no vocabulary of "
                                f"SentencePiece; {REMEDY}"
                            )
                        continue
                    content = read_json(path, self.name)
                    check_tokenizer(content, self.name, path.name)
                    # Written again: of a key that occurs twice, only the checked value is left.
                    content = scrub(content) if "config" in path.name else content
                    (Path(clean) / path.name).write_text(json.dumps(content))
                tokenizer = AutoTokenizer.from_pretrained(
                    clean, trust_remote_code=False, local_files_only=True
                )
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # tokenizers' panics are no Exceptions
            raise UserError(
                f"{self.name}: its tokenizer cannot be read ({on_one_line(error)}); {REMEDY}"
            ) from error
        if not callable(tokenizer):  # transformers returns False or a class for some nonsense
            raise UserError(f"{self.name}: its files describe no tokenizer; {REMEDY}")
        tokenizer.name_or_path = self.name
        return tokenizer


def open_repository(source: str, revision: str | None, weights: bool) -> Repository:
    """Open a folder, or download a hub repository to the hub's cache, weights only if wanted."""
    folder = _local_folder(source)
    if folder is not None:
        if revision is not None:
            raise UserError(f"{source} is a folder and has no revisions; drop {revision!r}")
        if not (folder / "config.json").exists():
            raise UserError(f"{source} has no config.json; {_what_is_there(folder)}")
        return Repository(source, folder, None)
    with _hub_errors(source, revision):
        config = Path(hf_hub_download(source, "config.json", revision=revision))
        # The commit behind the revision: the remaining files must come from the same one.
        commit = config.parent.name
        patterns = ["config.json", *TOKENIZER, *(WEIGHTS if weights else ())]
        return Repository(
            source,
            Path(snapshot_download(source, revision=commit, allow_patterns=patterns)),
            commit,
        )


def open_tokenizer(source: str) -> Any:
    """The tokenizer in a folder, which need not hold a model, or of a hub repository."""
    folder = _local_folder(source)
    if folder is None:
        with _hub_errors(source, None):
            patterns = ["config.json", *TOKENIZER]
            folder = Path(snapshot_download(source, allow_patterns=patterns))
    found = Repository(source, folder, None).tokenizer()
    if found is None:
        raise UserError(
            f"{source} has no tokenizer; expected tokenizer.json or a vocabulary among its files"
        )
    return found


def _local_folder(source: str) -> Path | None:
    """The folder that `source` names; None if it can only be a name on the hub."""
    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            next(folder.iterdir(), None)  # raises if the folder may not be read
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~nobody, a null character
        raise UserError(
            f"{for_terminal(source, 80)} is not a folder with a model ({on_one_line(error)[:80]}); "
            "check the path"
        ) from error
    if exists or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"{for_terminal(source, 200)} is not a folder with a model; check the path")
    return None


def _what_is_there(folder: Path) -> str:
    """What a folder without config.json holds, as far as its names tell, and the remedy."""
    if (folder / "adapter_config.json").exists():
        return (
            "it holds an adapter (LoRA), not a model: merge it into its base model with "
            "peft's merge_and_unload, save the result with save_pretrained, and give that folder"
        )
    inner = [path.parent for path in folder.glob("*/config.json")]
    inner += [path.parent for path in folder.glob("snapshots/*/config.json")]
    if inner:
        # checkpoint-1000 after checkpoint-200: by number, then by name
        latest = max(inner, key=lambda p: (int("0" + "".join(re.findall(r"\d+$", p.name))), p.name))
        return (
            f"it holds {len(inner)} folder{'s' * (len(inner) > 1)} with one; "
            f"give one of them, such as {for_terminal(str(latest), 200)}"
        )
    return "give a folder written by save_pretrained"


HUB_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (
        GatedRepoError,
        "{name} is gated; accept its terms on its hub page, then log in with `hf auth login`",
    ),
    (
        RevisionNotFoundError,
        "{name} has no revision {revision!r} on the hub; give a branch, tag or commit it has",
    ),
    (
        RepositoryNotFoundError,
        "there is no model {name!r} on the hub, or it is private; "
        "check the spelling, or log in with `hf auth login` for a private model",
    ),
    (
        OfflineModeIsEnabled,
        "{name} is not in the local cache, and HF_HUB_OFFLINE prevents downloading it; "
        "unset it, or give a folder with the model",
    ),
    (
        LocalEntryNotFoundError,
        "{name} is not in the local cache, and the hub cannot be reached; "
        "check the connection, or give a folder with the model",
    ),
    (
        EntryNotFoundError,
        "{name} has no config.json: it is not a model that transformers can read; "
        "if it is an adapter (LoRA), merge it into its base model first",
    ),
    (
        HFValidationError,
        "{name!r} is neither a folder nor the name of a model on the hub (owner/name)",
    ),
    (HfHubHTTPError, "the hub did not answer for {name} ({error}); try again later"),
)
"""Error messages for the hub's exceptions, special cases first."""


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except tuple(kind for kind, _ in HUB_ERRORS) as error:
        kinds = [kind for kind, _ in HUB_ERRORS if isinstance(error, kind)]
        # Offline, the hub raises the same error as for a broken connection; the remedy differs.
        kind = (
            OfflineModeIsEnabled
            if kinds[0] is LocalEntryNotFoundError and is_offline_mode()
            else kinds[0]
        )
        message = dict(HUB_ERRORS)[kind].format(
            name=name, revision=revision, error=on_one_line(error)
        )
        raise UserError(message) from error


def scrub(config: Any) -> Any:
    """The configuration without entries that name code or files, at any depth."""
    if isinstance(config, dict):
        kept = {
            key: value for key, value in config.items() if not key.lstrip("_").startswith(FORBIDDEN)
        }
        return {key: scrub(value) for key, value in kept.items()}
    return [scrub(value) for value in config] if isinstance(config, list) else config
