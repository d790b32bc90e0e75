"""The notebooks run from top to bottom, and what they print is what is stored in them.

They are stored with their outputs, because the documentation site shows them as they are.
`python -m tests.test_notebooks` runs all of them and stores the new outputs.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.test_docs import NUMBER, assert_same_output

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LARGEST = 100_000
"""Bytes of a notebook with its figures."""


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell prints. Tables and figures are left out: they have tests of their own."""
    return [
        "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def executed(path: Path, directory: Path) -> nbformat.NotebookNode:
    """A notebook run in a new kernel, from an empty directory, with nothing that tells when."""
    notebook = nbformat.read(path, as_version=4)
    # The kernel imports this lipscope, whatever is installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        coalesce_streams=True,
        startup_timeout=120,
        timeout=240,
        record_timing=False,
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute(env=environment)
    return notebook


def assert_as_stored(found: nbformat.NotebookNode, stored: nbformat.NotebookNode) -> None:
    """Every cell prints what is stored, up to one in the last digit of a number.

    Of a cell tagged "numbers vary" only the words count: hundreds of steps of training amplify the
    rounding of a processor.
    """
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    for new, old, cell in zip(printed(found), printed(stored), code, strict=True):
        if "numbers vary" in cell["metadata"].get("tags", ()):
            new, old = (re.sub(NUMBER, "0", text) for text in (new, old))
        assert_same_output(new, old)


def test_there_are_four_notebooks():
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_is_stored(path, tmp_path):
    assert_as_stored(executed(path, tmp_path), nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_complete(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    assert notebook["cells"][0]["source"].startswith("# "), "a notebook begins with its title"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert '"stderr"' not in path.read_text()
    assert any(printed(notebook)), "run `python -m tests.test_notebooks` to store the outputs"


def test_a_stale_output_is_seen():
    cell = nbformat.v4.new_code_cell("print(0.11)")
    cell["outputs"] = [nbformat.v4.new_output("stream", name="stdout", text="0.11\n")]
    old = nbformat.v4.new_notebook(cells=[cell])
    stale = nbformat.from_dict(old)
    stale["cells"][0]["outputs"][0]["text"] = "0.21\n"
    assert_as_stored(old, nbformat.from_dict(old))
    with pytest.raises(AssertionError):
        assert_as_stored(old, stale)
    stale["cells"][0]["metadata"]["tags"] = ["numbers vary"]
    assert_as_stored(old, stale)


def main() -> None:
    """Run every notebook and store its outputs."""
    import tempfile

    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as directory:
            notebook = executed(path, Path(directory))
        for cell in notebook["cells"]:
            cell["metadata"] = {key: x for key, x in cell["metadata"].items() if key == "tags"}
            # Warnings of other packages name paths of this machine.
            outputs = cell.get("outputs", [])
            outputs[:] = [output for output in outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
