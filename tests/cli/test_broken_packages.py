"""A package that transformers loads and that is broken is one sentence in every command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "measure", "bounds", "budget", "attack --kind tokens", "check model run.safetensors",
)  # fmt: skip
RUN = f"""
from lipscope.cli import main
for command in {COMMANDS}:
    print(main(command.split()))
main(["doctor"])
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    "code",
    ['raise RuntimeError("operator torchvision::nms does not exist")', "import no_such_module"],
)
def test_a_broken_torchvision_is_one_sentence_in_every_command(tmp_path, code):
    package, about = tmp_path / "torchvision", tmp_path / "torchvision-0.99.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").write_text(code)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout.split("\n")[: len(COMMANDS)] == ["2"] * len(COMMANDS)
    said = done.stderr.splitlines()
    assert len(said) == len(COMMANDS), done.stderr
    for line in said:
        assert line.startswith("lipscope: torchvision does not load here (") and "reinstall" in line
    (row,) = (row for row in done.stdout.splitlines() if row.startswith("torchvision"))
    assert "0.99, does not load (" in row
