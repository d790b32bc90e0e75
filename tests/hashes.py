"""Hashes of the pinned packages, for installing them and nothing else.

    python -m tests.hashes                  # writes constraints-hashed.txt from the package index
    pip install --require-hashes --no-deps -r constraints-hashed.txt

The files listed are those for the Pythons and systems that lipscope supports, and the sources.
`tests/test_lowest.py` compares the pins with those of constraints.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
ABOUT = "constraints.txt with hashes of the files; written by: python -m tests.hashes"
PYTHONS = ("py3", "py2.py3", "py311", "cp311", "cp312", "cp313")
SYSTEMS = re.compile(r"any|macosx_.*|(many)?linux.*_(x86_64|aarch64)")
PINNED, HASHED = ROOT / "constraints.txt", ROOT / "constraints-hashed.txt"


def pins() -> dict[str, str]:
    """The pinned versions by name."""
    lines = PINNED.read_text().splitlines()
    return dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)


def index() -> str:
    """The package index that pip uses."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    from pip._internal.models.index import PyPI

    return (configured or PyPI.simple_url).rstrip("/")


def files(name: str, where: str) -> list[tuple[str, str]]:
    """All files of a package with their hashes."""
    page = re.sub(r"[-_.]+", "-", name).lower()
    request = urllib.request.Request(f"{where}/{page}/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return re.findall(r"([^/\"]+)#sha256=([0-9a-f]{64})", text)


def of_version(name: str, version: str, where: str) -> list[str]:
    """The hashes of the files of one version."""
    found = [digest for file, digest in files(name, where) if serves(file, Version(version))]
    if not found:
        raise SystemExit(f"the index has no {name} {version}")
    return sorted(found)


def serves(file: str, version: Version) -> bool:
    """Whether a file is a source or a wheel of the version, for a Python and a system supported."""
    try:
        if not file.endswith(".whl"):
            return parse_sdist_filename(file)[1] == version
        _, own, _, tags = parse_wheel_filename(file)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return False  # eggs and installers of long ago
    return own == version and any(
        (tag.interpreter in PYTHONS or tag.abi == "abi3") and SYSTEMS.fullmatch(tag.platform)
        for tag in tags
    )


def main() -> None:
    where, pinned = index(), pins()
    with ThreadPoolExecutor(8) as pool:
        hashes = list(pool.map(lambda pin: of_version(*pin, where), pinned.items()))
    blocks = [
        " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in digests)])
        for (name, version), digests in zip(pinned.items(), hashes, strict=True)
    ]
    HASHED.write_text(f"# {ABOUT}\n" + "\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
