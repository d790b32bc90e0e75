"""Sweeps: one study for each model, text and group of settings in a TOML file."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lipscope._checks import abbreviate, check_arguments
from lipscope._files import whole_file
from lipscope._types import UserError
from lipscope.models.loading import check_loading, load
from lipscope.models.model import Model
from lipscope.models.model_files import on_one_line
from lipscope.study.engines import SchedulerLostError
from lipscope.study.jobs import Shard
from lipscope.study.reading import TextColumn, content
from lipscope.study.run import DEFAULTS, OpenEngine, Progress, check_settings, run_measurement
from lipscope.study.study import Study

STAMP = "sweep.stamp"
"""File beside a finished study: a digest of what it was made from."""

OF_MODEL: Mapping[str, Any] = {
    "dtype": None, "device": None, "revision": None, "random_init": None, "tokenizer": None,
}  # fmt: skip
"""The settings of a sweep that are arguments of `load`; the others are those of `measure`."""

MOST_STUDIES = 100_000
"""All studies are listed before the first is made; more of them would fill memory."""


class Entry(NamedTuple):
    """One study of a sweep: what is loaded, what is read, what is measured, and where it goes."""

    model: str
    loading: dict[str, Any]
    text: Path | TextColumn | None
    measuring: dict[str, Any]
    out: Path

    def stamp(self) -> str:
        """A digest of everything the study is made from, as far as it shows without loading."""
        words = None if self.text is None else content(self.text)
        # As `make` does it: a model that was written again is another one.
        files = [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(Path(self.model).glob("*.*"))
            if path.suffix in (".safetensors", ".json")
        ]
        whole = [self.model, self.loading, words, self.measuring, files]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def finished(self) -> bool:
        """Return whether the study is complete and was made with the current settings."""
        try:
            if (self.out / STAMP).read_text(encoding="utf-8") != self.stamp():
                return False
        except (OSError, UnicodeDecodeError):  # no stamp, or none that a sweep wrote
            return False
        with closing(Study.open(self.out)) as study:
            return not study.unfinished and not study.damage

    def measure(
        self, model: Model, engine: OpenEngine, progress: Progress | None
    ) -> tuple[str, bool]:
        """Make the study; how it ended, and whether some of it is missing."""
        stamp = self.stamp()
        study = run_measurement(
            model, self.text, self.measuring, engine=engine, out=self.out, progress=progress
        )
        with closing(study):
            if study.failed:
                return f"{len(study.failed)} rows failed", True
        with whole_file(self.out / STAMP) as draft:
            draft.write_text(stamp, encoding="utf-8")
        return "measured", False


class Ending(NamedTuple):
    """How a study of a sweep ended: measured, finished before, or why some of it is missing."""

    entry: Entry
    how: str
    failed: bool = False


@dataclass(frozen=True)
class Sweep:
    """The studies of a sweep, grouped by model."""

    entries: tuple[Entry, ...]

    def part(self, shard: Shard) -> Sweep:
        """A part of the sweep; all studies of a model are in one part, which alone loads it."""
        return Sweep(tuple(entry for entry in self.entries if shard.has(entry.model)))

    def run(
        self, engine: OpenEngine, progress: Callable[[Entry], Progress | None]
    ) -> Iterator[Ending]:
        """Measure unfinished studies; a failure in one does not stop the others.

        Args:
            engine: Opens the engine that runs the jobs.
            progress: Makes the `progress` of `measure` for one study.
        """
        for _, entries in groupby(self.entries, lambda entry: (entry.model, entry.loading)):
            model: Model | None = None
            for entry in entries:
                try:
                    if entry.finished():
                        ending = Ending(entry, "finished before")
                    else:
                        model = model or load(entry.model, **entry.loading)
                        ending = Ending(entry, *entry.measure(model, engine, progress(entry)))
                except SchedulerLostError:
                    raise
                except UserError as error:
                    ending = Ending(entry, str(error), failed=True)
                except Exception as error:  # the other studies do not depend on this one
                    reason = f"{type(error).__name__}: {on_one_line(error)}"
                    ending = Ending(entry, reason, failed=True)
                yield ending


def read_sweep(path: Path) -> Sweep:
    """The sweep in a TOML file; relative paths in it begin at its directory.

    Args:
        path: The file, with the keys models, texts, settings and out; see docs/scaling.md.

    Raises:
        UserError: If the file cannot be read, or asks for what does not exist.
    """
    try:
        asked = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read the sweep in {path}: {error}") from error
    _check_keys(asked, ("models", "texts", "settings", "out"), str(path))
    try:
        models = _models(asked.get("models"), path.parent)
    except (OSError, ValueError) as error:  # a name that is too long
        raise UserError(f"{path}: cannot look for the models: {error}") from error
    texts = _texts(asked.get("texts", []), path.parent)
    settings = asked.get("settings", {})
    if not isinstance(settings, dict) or not all(isinstance(x, dict) for x in settings.values()):
        raise UserError(f"{path}: settings are tables with names, as in [settings.short]")
    out = asked.get("out", path.stem)
    if not _is_path(out):
        raise UserError(f"{path}: out must be the name of a directory, got {abbreviate(out)}")
    # Everything in the file is checked before the first study begins, which may take hours.
    chosen = {
        name: _settings(table, f"{path}, settings.{name}")
        for name, table in (settings or {"": {}}).items()
    }
    if len(models) * len(chosen) * len(texts) > MOST_STUDIES:
        raise UserError(f"{path} asks for more than {MOST_STUDIES} studies; split it")
    entries: dict[str, Entry] = {}
    for model_name, model in models.items():
        for setting, (loading, measuring) in chosen.items():
            for text_name, text in texts.items():
                name = "--".join(filter(None, (model_name, text_name, setting)))
                _check_name(name, path)
                if name in entries:
                    raise UserError(f"{path}: two studies would be called {name}; rename settings")
                entries[name] = Entry(
                    model=model,
                    loading=loading,
                    text=text,
                    measuring=measuring,
                    out=path.parent / out / name,
                )
    return Sweep(tuple(entries.values()))


def _settings(table: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `load` and of `measure` in a table of settings, checked as theirs are."""
    _check_keys(table, (*OF_MODEL, *DEFAULTS), where)
    loading = {key: table[key] for key in OF_MODEL if key in table}
    measuring = {key: table.get(key, default) for key, default in DEFAULTS.items()}
    try:
        check_arguments(load, loading)
        check_loading(loading.get("dtype"), loading.get("random_init"))
        if not _is_path(loading.get("tokenizer", "the model's own")):
            raise UserError(
                f"tokenizer must be the name or folder of one, got "
                f"{abbreviate(loading['tokenizer'])}"
            )
        if isinstance(measuring["scopes"], str):
            measuring["scopes"] = [measuring["scopes"]]
        check_settings(measuring)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return loading, measuring


def _check_name(name: str, path: Path) -> None:
    """Raise UserError unless a study of this name lies directly in the directory of the sweep."""
    if name in ("", ".", "..") or not name.isprintable() or {"/", "\\"} & set(name):
        raise UserError(
            f"{path}: a study cannot be called {abbreviate(name)}; the names of settings, models "
            "and "
            "texts may not contain slashes or control characters"
        )
    if len(os.fsencode(name)) > 255:
        raise UserError(
            f"{path}: {abbreviate(name)} is too long for the name of a directory; shorten its parts"
        )


def _is_path(given: object) -> bool:
    return isinstance(given, str) and given != "" and "\0" not in given


def _check_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UserError(f"{where}: {key} is not known; the keys are {', '.join(known)}")


def _models(given: Any, folder: Path) -> dict[str, str]:
    """Models by name: folders, and names on the hub."""
    if not isinstance(given, list) or not given or not all(map(_is_path, given)):
        raise UserError(
            f"models must be a list of model ids and directories, got {abbreviate(given)}"
        )
    found = [(folder / one).absolute() if (folder / one).is_dir() else one for one in given]
    names = _names([_parts(Path(one)) for one in found])
    return dict(zip(names, map(str, found), strict=True))


def _texts(given: Any, folder: Path) -> dict[str, Path | TextColumn | None]:
    """Texts by name; the embedded text if there are none."""
    found: list[Path | TextColumn] = []
    for one in given if isinstance(given, list) else [given]:
        if _is_path(one):
            found.append((folder / one).absolute())
        elif (
            isinstance(one, dict)
            and one.keys() == {"file", "column"}
            and _is_path(one["file"])
            # A column has a name, or a number from 1.
            and (isinstance(one["column"], str) or type(one["column"]) is int)
            and (isinstance(one["column"], str) or 0 < one["column"] < 10**9)
        ):
            found.append(TextColumn((folder / one["file"]).absolute(), str(one["column"])))
        else:
            raise UserError(
                f'texts are files, or tables {{file = "news.csv", column = "title"}}; got '
                f"{abbreviate(one)}"
            )
    names = _names(
        [(*_parts(t.path), t.column) if isinstance(t, TextColumn) else _parts(t) for t in found]
    )
    return dict(zip(names, found, strict=True)) or {"": None}


def _parts(path: Path) -> tuple[str, ...]:
    """The parts of a path that name it; a study is never called "..", which is another place."""
    return path.resolve().parts if ".." in path.parts else path.parts


def _names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """The last parts of paths, as few as tell all of them apart."""
    for depth in range(1, max(map(len, paths), default=0) + 1):
        names = ["-".join(parts[-depth:]).replace("/", "") for parts in paths]
        if len(set(names)) == len(names):
            return names
    if paths:
        raise UserError("the sweep names a model or a text twice")
    return []
