"""The command `doctor`: versions, device and caches; or whether a study is damaged."""

from __future__ import annotations

import os
import platform
import warnings
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer

from lipscope import __version__
from lipscope._files import for_terminal, kind_of
from lipscope._types import UserError
from lipscope.cli import options as opt
from lipscope.cli.terminal import ExitCode, show_json

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy")
OPTIONAL = ("pandas", "pyarrow", "triton")
LOADED_BY_TRANSFORMERS = ("torchvision", "torchaudio")
"""Optional packages without which transformers works, unless they are installed and broken."""


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A study to check for damage.")
    ] = None,
    repair: Annotated[
        bool, opt.option("Write what is intact to DIR.repaired.", name="--repair")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Print versions, the device, and whether models can be downloaded; or check a study."""
    if directory is not None:
        return check_study(directory, repair)
    if repair:
        raise UserError("--repair needs the directory of a study: lipscope doctor DIR --repair")
    found = report()
    if as_json:
        return show_json(found)
    for name, value in found.items():
        typer.echo(f"{name:<14} {value}")


def report() -> dict[str, str]:
    """Collect everything a bug report should contain, by name."""
    import torch
    from huggingface_hub import constants, is_offline_mode

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "lipscope": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: _version(name) for name in (*NEEDED, *OPTIONAL)},
        **{name: _loaded(name) for name in LOADED_BY_TRANSFORMERS},
        "cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "cuda": ", ".join(devices) or "none",
        "hub cache": constants.HF_HUB_CACHE,
        "offline": "yes, by HF_HUB_OFFLINE" if is_offline_mode() else "no",
        "embedded": _embedded(),
    }


def check_study(directory: Path, repair: bool) -> None:
    """Read all of a study, print what is lost, and write the rest to DIR.repaired if asked to."""
    from lipscope.study.store import content
    from lipscope.study.study import DamageWarning, Study, copy_study

    warnings.simplefilter("ignore", DamageWarning)  # every loss is listed below
    study = Study.open(directory)
    lost = study.store.check()
    for name in lost:
        typer.echo(for_terminal(f"lost: {name}"))
    holds = content(study.store).replace(" ", " intact ")
    typer.echo(for_terminal(f"{directory} holds {holds}; lost: {len(lost)}"))
    if repair:
        place = directory.resolve()
        copy = place.with_name(f"{place.name}.repaired")
        if kind_of(copy) == "link":
            raise UserError(f"{copy} is a link, which --repair does not follow; remove it")
        copy_study(study, copy)
        typer.echo(for_terminal(f"{'what is intact' if lost else 'a copy'} is in {copy}"))
    if lost:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _loaded(name: str) -> str:
    """The version of an optional package, and why it does not load."""
    version = _version(name)
    if version == "not installed":
        return version
    try:
        import_module(name)
    except Exception as error:  # whatever its own code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        return f"{version}, does not load ({reason}); reinstall or uninstall it"
    return version


def _embedded() -> str:
    from lipscope.models import embedded

    if _version(embedded.PACKAGE) == embedded.VERSION:
        return f"{embedded.REVISION}, installed"
    place = embedded.cache_folder() / f"{embedded.PACKAGE}-{embedded.VERSION}"
    return f"{embedded.REVISION}, {'in' if place.is_dir() else 'will be downloaded to'} {place}"
