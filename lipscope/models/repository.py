"""Read a model repository, on the hub or on disk, without running any of its code."""

from __future__ import annotations

import json
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

from lipscope._types import UserError
from lipscope.models._transformers_internals import CONFIG_MAPPING
from lipscope.models.running import on_one_line

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

OWN_TYPES = {"lipscope_character": "lipscope.charlm.pretrained"}
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
        if kind in OWN_TYPES:
            import_module(OWN_TYPES[kind])  # importing it registers the type with transformers
        if kind not in CONFIG_MAPPING:
            raise UserError(
                f"{self.name} is of type {kind!r}, which this version of transformers does not "
                "contain, and lipscope never runs code that comes with a model; "
                "update transformers, or choose another model"
            )
        try:
            return CONFIG_MAPPING[kind].from_dict(raw)
        except Exception as error:  # each configuration class raises its own kind of error
            raise UserError(
                f"{self.name}: config.json does not describe a {kind} model ({on_one_line(error)})"
            ) from error

    def weights(self) -> dict[str, Tensor]:
        """All tensors, from safetensors files only."""
        index = self.folder / "model.safetensors.index.json"
        if (self.folder / "model.safetensors").is_file():
            names = {"model.safetensors"}
        elif index.is_file():
            names = set(read_json(index, self.name).get("weight_map", {}).values())
        else:
            names = set()
        # An index comes from the repository: it must not point outside the folder or at a pickle.
        foreign = [
            name
            for name in names
            if not fnmatch(name, "model*.safetensors") or Path(name).name != name
        ]
        if not names or foreign:
            pickled = any(
                fnmatch(path.name, pattern) for path in self.folder.iterdir() for pattern in PICKLES
            )
            found = (
                "only pickled weights, which can run code when they are read" if pickled else "none"
            )
            raise UserError(
                f"{self.name}: expected weights in model.safetensors or its shards, "
                f"got {foreign or found}; convert them with safetensors, or use random_init"
            )
        try:
            return {
                key: tensor
                for name in sorted(names)
                for key, tensor in load_file(self.folder / name).items()
            }
        except Exception as error:
            raise UserError(
                f"{self.name}: its safetensors files cannot be read ({error}); download them again"
            ) from error

    def tokenizer(self) -> Any:
        """The tokenizer, or None; transformers sees only the files that describe one."""
        files = [
            path
            for path in self.folder.iterdir()
            if any(fnmatch(path.name, pattern) for pattern in TOKENIZER)
        ]
        if not files:
            return None
        # AutoTokenizer follows what config files name, so it gets scrubbed copies of them.
        with tempfile.TemporaryDirectory() as clean:
            for path in [*files, self.folder / "config.json"]:
                if path.suffix == ".json" and "config" in path.name:
                    (Path(clean) / path.name).write_text(
                        json.dumps(scrub(read_json(path, self.name)))
                    )
                else:
                    shutil.copyfile(path, Path(clean) / path.name)
            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    clean, trust_remote_code=False, local_files_only=True
                )
            except (ValueError, OSError, ImportError, KeyError) as error:
                raise UserError(
                    f"{self.name}: its tokenizer cannot be read ({on_one_line(error)}); "
                    "pass one to load"
                ) from error
        tokenizer.name_or_path = self.name
        return tokenizer


def open_repository(source: str, revision: str | None, weights: bool) -> Repository:
    """Open a folder, or download a hub repository to the hub's cache, weights only if wanted."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{source} has no config.json; give a folder written by save_pretrained"
            )
        return Repository(source, folder, None)
    if folder.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"{source} is not a folder with a model; check the path")
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
        "{name} has no config.json: it is not a model that transformers can read",
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


def read_json(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the model `name`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {path.name} cannot be read ({on_one_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{name}: {path.name} must contain a JSON object, got {type(content).__name__}"
        )
    return content
