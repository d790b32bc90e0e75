"""Under which conditions claims are run: size, models, texts, device, and what stands in."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lipscope._types import UserError
from lipscope.models.embedded import default_text
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.study.texts import TextColumn, read_file

Progress = Callable[[float, float], None]

TEXTS = {
    "alice": ("alice.txt", None),
    "ag_news": ("ag_news_test.csv", "text"),
    "ptb_train": ("ptb.char.train.txt", None),
    "ptb_valid": ("ptb.char.valid.txt", None),
    "ptb_test": ("ptb.char.test.txt", None),
}
"""Files of `--text-dir` by the name a claim uses, and the column of a table."""

STAND_IN_MODEL, STAND_IN_TEXT = "all-MiniLM-L6-v2", "Python's help topics"
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2Model"]},
    "bert-base-uncased": {"model_type": "bert", "architectures": ["BertModel"]},
}
"""Architectures whose default configuration is the model of that name, for random weights."""


class Setting:
    """What a run may use, and a note of what it did use.

    Attributes:
        quick: Whether to run in seconds, with fewer lengths, samples and steps.
        device: The device for large runs, for example "cpu" or "cuda".
        seed: Seed of everything random.
        progress: Called with (done, total) of the current claim.
        used: Hash of each model and text that the current claim asked for, by name; a stand-in
            has "stand-in " before it.
    """

    def __init__(
        self,
        quick: bool = False,
        models: Path | None = None,
        texts: Path | None = None,
        device: str = "cpu",
        seed: int = 0,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.quick, self.models, self.texts = quick, models, texts
        self.device, self.seed, self.progress = device, seed, progress
        self.used: dict[str, str] = {}
        self._loaded: dict[tuple[str, int | None], Model] = {}

    def model(self, name: str, random_init: int | None = None) -> tuple[Model, bool]:
        """The model of this name in `models`, or the embedded one, and whether it stands in.

        Args:
            name: For example "bert-base-uncased".
            random_init: Seed of random weights; then only the tokenizer may stand in, and the
                second result is False.
        """
        self.used[name] = self.model_hash(name, random_init)
        key = (name, random_init)
        if key not in self._loaded:
            self._loaded[key] = self._load(name, random_init)
        return self._loaded[key], self.used[name].startswith("stand-in")

    def text(self, name: str) -> tuple[str, bool]:
        """The text of this name in `texts`, or the embedded prose, and whether it stands in."""
        self.used[name] = self.text_hash(name)
        file, column = TEXTS[name]
        if self.texts is None or not (self.texts / file).is_file():
            return default_text(), True
        path = self.texts / file
        return (read_file(path) if column is None else TextColumn(path, column).read()), False

    def model_hash(self, name: str, random_init: int | None = None) -> str:
        """sha256 of the files of a model, or the name of what stands in for it."""
        folder = self._folder(name)
        if random_init is not None:
            return f"random weights {random_init}"
        if folder is None:
            return f"stand-in {STAND_IN_MODEL}"
        digest = hashlib.sha256()
        for path in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def text_hash(self, name: str) -> str:
        """sha256 of a text, or the name of what stands in for it."""
        path = None if self.texts is None else self.texts / TEXTS[name][0]
        if path is None or not path.is_file():
            return f"stand-in {STAND_IN_TEXT}"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def same(self, used: dict[str, str]) -> bool:
        """Whether a run under this setting would use the same models and texts."""
        return all(self._hash_now(name, before) == before for name, before in used.items())

    def _hash_now(self, name: str, before: str) -> str:
        if before.startswith("random weights"):
            return before
        return self.text_hash(name) if name in TEXTS else self.model_hash(name)

    def _folder(self, name: str) -> Path | None:
        folder = None if self.models is None else self.models / name
        return folder if folder is not None and folder.is_dir() else None

    def _load(self, name: str, random_init: int | None) -> Model:
        folder = self._folder(name)
        if folder is not None:
            return load(folder, device=self.device, random_init=random_init)
        if random_init is None:
            return load(None, device=self.device)
        if name not in CONFIGS:
            raise UserError(f"there is no configuration for {name}; put its folder into --models")
        # A configuration without numbers is the default one, which is the released model's.
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
            return load(place, "embedded", device=self.device, random_init=random_init)
