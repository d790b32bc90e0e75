"""The environment: versions, device, caches, and whether models can be downloaded."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from lipscope import __version__

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "triton",
)


def report() -> dict[str, str]:
    """Everything a bug report should contain, by name."""
    import torch
    from huggingface_hub import constants, is_offline_mode

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "lipscope": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: _version(name) for name in PACKAGES},
        "cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "cuda": ", ".join(devices) or "none",
        "hub cache": constants.HF_HUB_CACHE,
        "offline": "yes, by HF_HUB_OFFLINE" if is_offline_mode() else "no",
        "embedded": _embedded(),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _embedded() -> str:
    from lipscope.models import embedded

    if _version(embedded.PACKAGE) == embedded.VERSION:
        return f"{embedded.REVISION}, installed"
    place = embedded.cache_folder() / f"{embedded.PACKAGE}-{embedded.VERSION}"
    return f"{embedded.REVISION}, {'in' if place.is_dir() else 'will be downloaded to'} {place}"
