"""Under which conditions claims are run: size, models, texts, device, and what stands in."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lipscope import UserError
from lipscope.models import embedded
from lipscope.models.loading import load
from lipscope.models.model import Model
from lipscope.papers.charlm.characters import CharacterText
from lipscope.study.reading import read_file

Progress = Callable[[float, float], None]
T = TypeVar("T")

TEXTS = {
    "alice": "alice.txt",
    "ag_news": "ag_news_test.csv",
    "ptb_train": "ptb.char.train.txt",
    "ptb_valid": "ptb.char.valid.txt",
    "ptb_test": "ptb.char.test.txt",
}
"""Files of `--text-dir` by the name a claim uses."""

LOOKED_AT = 1000
"""Words that decide in which form a file of Penn Treebank is."""

STAND_IN = "stand-in "
"""Begins the note of everything that stands in for what a paper used."""

TOKENIZER = " tokenizer"
"""Ends the name of the tokenizer of a model with random weights."""

PROSE = "Python's help topics"
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2Model"]},
    "bert-base-uncased": {"model_type": "bert", "architectures": ["BertModel"]},
}
"""Architectures whose default configuration is the model of that name, for random weights."""

STAND_INS = {
    "gpt2": f"{embedded.NAME} with a causal mask",
    "long-context": "a Llama with random weights",
}
"""What stands in for a model, where it is not the embedded one as it is."""


class Setting:
    """What a run may use, and a note of what it did use.

    Attributes:
        quick: Whether to run in seconds, with fewer lengths, samples and steps.
        device: The device for large runs, for example "cpu" or "cuda".
        seed: Seed of everything random.
        progress: Called with (done, total) of the current claim.
        used: Hash of each model and text that the current claim asked for, by name; a stand-in
            has "stand-in " before it.

    Raises:
        UserError: If `models` or `texts` is not a folder.
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
        self.quick = quick
        self.models = _checked("models", models)
        self.texts = _checked("texts", texts)
        self.device = device
        self.seed = seed
        self.progress = progress
        self.used: dict[str, str] = {}
        self._hashes: dict[Path, str] = {}
        self._loaded: dict[tuple[Any, ...], Model] = {}
        self._shared: dict[tuple[Any, ...], tuple[Any, dict[str, str]]] = {}

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make an equal setting, on another machine too."""
        names = ("quick", "models", "texts", "device", "seed")
        return {name: getattr(self, name) for name in names}

    def track(self, items: Sequence[T]) -> Iterator[T]:
        """The items in turn, with progress."""
        for i, item in enumerate(items):
            self.progress(i, len(items))
            yield item

    def model(
        self, name: str, random_init: int | None = None, causal: bool = False
    ) -> tuple[Model, bool]:
        """The model of this name in `models`, or the embedded one, and whether it stands in.

        Args:
            name: For example "bert-base-uncased".
            random_init: Seed of random weights; then only the tokenizer can stand in.
            causal: Whether an encoder is read as a decoder, with a causal mask. The stand-in for
                GPT-2 always is.
        """
        causal = causal or (name == "gpt2" and self._folder(name) is None and random_init is None)
        self.used[name] = self._model_note(name, random_init)
        if random_init is not None:
            self.used[name + TOKENIZER] = self._tokenizer_note(name)
        key = (name, random_init, causal)
        if key not in self._loaded:
            # One at a time: a model in float64 takes a gigabyte.
            self._loaded = {key: self._load(name, random_init, causal)}
        return self._loaded[key], self.used[name].startswith(STAND_IN)

    def text(self, name: str) -> tuple[str, bool]:
        """The text of this name in `texts`, or the embedded prose, and whether it stands in."""
        self.used[name] = self._text_note(name)
        path = self._text_path(name)
        if path is None:
            prose = embedded.default_text()
            # Another part for each, so that two texts remain two texts.
            return (prose if name == "alice" else prose[len(prose) // 2 :]), True
        if path.suffix == ".csv":
            return " ".join(text for _, text in self.labelled(name) or []), False
        return read_file(path), False

    def labelled(self, name: str) -> list[tuple[int, str]] | None:
        """The label and the text of every line of a table such as AG_NEWS; None if it is missing.

        A line holds the label and then the parts of the text, as torchtext distributes them.
        """
        self.used[name] = self._text_note(name)
        path = self._text_path(name)
        if path is None:
            return None
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if len(row) >= 2]
        if not rows or not rows[0][0].strip().isdigit():
            raise UserError(f"{path} must have a class number in its first column, and no header")
        return [(int(row[0]), " ".join(row[1:])) for row in rows]

    def shared(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` returns, made once for all claims that ask under this key."""
        if key not in self._shared:
            before = self.used
            self.used = {}
            try:
                self._shared[key] = make(), dict(self.used)
            finally:
                self.used = before
        found, used = self._shared[key]
        self.used |= used
        value: T = found
        return value

    def folder(self, name: str) -> Path | None:
        """The folder of a model in `models`, or None if it is missing; noted either way."""
        self.used[name] = self._model_note(name, None)
        return self._folder(name)

    def same(self, used: dict[str, str]) -> bool:
        """Whether a run under this setting would use the same models and texts."""
        return all(self._note_now(name, before) == before for name, before in used.items())

    def _note_now(self, name: str, before: str) -> str:
        if name in TEXTS:
            return self._text_note(name)
        if name.endswith(TOKENIZER):
            return self._tokenizer_note(name.removesuffix(TOKENIZER))
        return before if before.startswith("random weights") else self._model_note(name, None)

    def _model_note(self, name: str, random_init: int | None) -> str:
        if random_init is not None:
            return f"random weights, seed {random_init}"
        folder = self._folder(name)
        if folder is None:
            return STAND_IN + STAND_INS.get(name, embedded.NAME)
        if folder not in self._hashes:  # once: it takes seconds
            digest = hashlib.sha256()
            for path in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
                with open(path, "rb") as file:
                    digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
            self._hashes[folder] = digest.hexdigest()
        return f"sha256 {self._hashes[folder]}"

    def _tokenizer_note(self, name: str) -> str:
        if self._folder(name) is None:
            return f"{STAND_IN}the tokenizer of all-MiniLM-L6-v2"
        return self._model_note(name, None)

    def _text_note(self, name: str) -> str:
        path = self._text_path(name)
        if path is None:
            # Which text it is depends on the version of Python.
            return f"{STAND_IN}{PROSE} (sha256 {_prose_digest()})"
        return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"

    def _text_path(self, name: str) -> Path | None:
        path = None if self.texts is None else self.texts / TEXTS[name]
        return path if path is not None and path.is_file() else None

    def _folder(self, name: str) -> Path | None:
        folder = None if self.models is None else self.models / name
        return folder if folder is not None and folder.is_dir() else None

    def _load(self, name: str, random_init: int | None, causal: bool) -> Model:
        folder = self._folder(name)
        if folder is None and random_init is not None:
            if name not in CONFIGS:
                raise UserError(
                    f"there is no configuration for {name}; put its folder into --models"
                )
            # A configuration without numbers is the default one, which is the released model's.
            return self.from_config(CONFIGS[name], random_init)
        if not causal or (name == "gpt2" and folder is not None):
            return load(folder, device=self.device, random_init=random_init)
        source = folder or embedded.folder()
        # The same files with another configuration; links out of a folder are not followed.
        with tempfile.TemporaryDirectory() as place:
            for path in source.iterdir():
                if path.is_file() and path.suffix in (".json", ".safetensors", ".txt"):
                    shutil.copy(path, place)
            config = Path(place) / "config.json"
            fields = json.loads(config.read_text(encoding="utf-8")) | {"is_decoder": True}
            config.write_text(json.dumps(fields), encoding="utf-8")
            return load(place, device=self.device)

    def from_config(
        self, config: dict[str, Any], seed: int, dtype: str = "float64", device: str | None = None
    ) -> Model:
        """A model with random weights from the fields of a `config.json`."""
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            where = device or self.device
            return load(place, "embedded", device=where, dtype=dtype, random_init=seed)


def _checked(name: str, folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise UserError(f"{name} must be a folder, and there is none at {folder}")
    return None if folder is None else folder.absolute()


@cache
def _prose_digest() -> str:
    return hashlib.sha256(embedded.default_text().encode()).hexdigest()


def plain_text(content: str) -> str:
    """The text of a file of Penn Treebank, one sentence per line.

    Two forms are in circulation: words as they are, and one character per word with "_" for a space
    (` n o _ i t _ w a s `). Both give the same text, so that losses agree.
    """
    words = content.split(maxsplit=LOOKED_AT)[:LOOKED_AT]
    if not words or any(len(word) > 1 for word in words):
        return "\n".join(line.strip() for line in content.splitlines() if line.strip())
    lines = ("".join(line.split()) for line in content.splitlines())
    return "\n".join(line.replace("_", " ").strip() for line in lines if line)


def penn_treebank(setting: Setting, context: int) -> CharacterText:
    """The training and test part of Penn Treebank, or the embedded prose where it is missing.

    It comes from the user's own files: the licence does not allow shipping them.

    Raises:
        UserError: If one of the two files is there without the other.
    """
    (learned, no_training), (held_out, no_test) = (
        setting.text(name) for name in ("ptb_train", "ptb_test")
    )
    if no_training != no_test:
        here, missing = ("ptb_test", "ptb_train") if no_training else ("ptb_train", "ptb_test")
        raise UserError(
            f"the folder of texts has {TEXTS[here]} but not {TEXTS[missing]}; "
            "Penn Treebank needs both"
        )
    if no_training:
        return CharacterText.of(learned, context)
    return CharacterText.of_parts(plain_text(learned), plain_text(held_out), context)
