"""What the documentation shows and names is true: its Python, notebooks, tables, commands, paths.

The blocks of Python of a page run one after the other in one namespace. A block that the tests
cannot run carries the comment `<!-- not run: reason -->` on the line before it. A block of text
right after a block of Python is its output; a comment with four decimals is the value of its
expression. Notebooks are stored with their outputs, because the documentation site shows them as
they are; `python -m tests.test_docs` runs all of them and stores the new outputs.
"""

import argparse
import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from typer.main import get_command

from benchmarks import attend, error_budget_tables, training_page
from lipscope.cli.commands import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
VERBS = getattr(get_command(app), "commands")  # noqa: B009  (a typer group)
BLOCK = re.compile(
    r"(?:^<!-- not run:(?P<reason>[^\n]*)-->\n)?"
    r"^```python\n(?P<code>.*?)^```$"
    r"(?:\n\s*^```text\n(?P<output>.*?)^```$)?",
    flags=re.DOTALL | re.MULTILINE,
)
VALUE = re.compile(r"#\s+(\d+\.\d{4})\b")
NUMBER = r"\d+(?:\.\d+)?"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class Block(NamedTuple):
    """A block of Python; `reason` says why it is not run, and is None where it is."""

    code: str
    output: str
    reason: str | None


def blocks(page: str) -> list[Block]:
    """The blocks of Python on a page, in order."""
    return [
        Block(
            code=found["code"],
            output=found["output"] or "",
            reason=None if found["reason"] is None else found["reason"].strip(),
        )
        for found in BLOCK.finditer(page)
    ]


def run(block: Block, names: dict[str, Any], name: str) -> None:
    """Run a block statement by statement and compare the values in its comments."""
    lines, checked = block.code.splitlines(), 0
    for statement in ast.parse(block.code).body:
        said = VALUE.search(lines[statement.end_lineno - 1])
        if said and isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), name, "eval"), names)
        else:
            exec(compile(ast.Module([statement], []), name, "exec"), names)
            if not (said and isinstance(statement, ast.Assign)):
                continue
            (target,) = statement.targets
            value = names[target.id]
        value = float(getattr(value, "value", value))
        assert value == pytest.approx(float(said[1]), abs=5e-5), lines[statement.end_lineno - 1]
        checked += 1
    assert checked == len(VALUE.findall(block.code)), "a number is beside no expression"


def assert_same_output(found: str, expected: str) -> None:
    """The same words, and numbers that differ by one in the last digit shown at most."""
    assert re.sub(NUMBER, "#", found).split() == re.sub(NUMBER, "#", expected).split()
    for x, y in zip(re.findall(NUMBER, found), re.findall(NUMBER, expected), strict=True):
        digits = max(len(z.partition(".")[2]) for z in (x, y))
        assert abs(float(x) - float(y)) <= 1.01 * 10**-digits * (digits > 0), (x, y)


RUN = [page for page in PAGES if any(block.reason is None for block in blocks(page.read_text()))]


@pytest.mark.wide
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module="transformers|accelerate|torch|pytorch_lightning|lightning"
        )
        for block in blocks(page.read_text()):
            if block.reason is None:
                run(block, names, page.name)
                printed = capsys.readouterr().out
                if block.output:
                    assert_same_output(printed, block.output)


def test_a_block_that_is_not_run_has_a_reason():
    for page in PAGES:
        text = page.read_text()
        found = blocks(text)
        assert len(found) == text.count("```python"), f"{page}: a block not found is not run"
        reasons = [block.reason for block in found if block.reason is not None]
        assert "" not in reasons, f"{page}: say why the block is not run"
        comments = re.findall("^<!-- not run", text, flags=re.MULTILINE)
        assert len(reasons) == len(comments), f"{page}: put it right before a block"


# Notebooks


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
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        coalesce_streams=True,
        startup_timeout=120,
        timeout=240,
        record_timing=False,
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    return notebook


@pytest.mark.wide
@each_notebook
def test_a_notebook_runs_and_prints_what_is_stored(path, tmp_path):
    found, stored = executed(path, tmp_path), nbformat.read(path, as_version=4)
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    for new, old, cell in zip(printed(found), printed(stored), code, strict=True):
        # Hundreds of steps of training amplify the rounding of a processor: only words count.
        if "numbers vary" in cell["metadata"].get("tags", ()):
            new, old = (re.sub(NUMBER, "0", text) for text in (new, old))
        assert_same_output(new, old)


@each_notebook
def test_a_notebook_is_small_and_complete(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 100_000
    assert notebook["cells"][0]["source"].startswith("# "), "a notebook begins with its title"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert '"stderr"' not in path.read_text()
    assert any(printed(notebook)), "run `python -m tests.test_docs` to store the outputs"


# Tables made from stored figures


def made_of(name: str) -> list[str]:
    """The parts of a page that are made from stored figures, as they would be made now."""
    if name == "training.md":
        results = json.loads(training_page.RESULTS.read_text())
        return [training_page.filled(training_page.PAGE.read_text(), results)]
    if name == "error_budgets.md":
        figures = error_budget_tables.figures(error_budget_tables.stored())
        return [f"{error_budget_tables.BEGIN}\n\n{figures}\n\n{error_budget_tables.END}"]
    result = json.loads((attend.RESULTS / "attend_h200.json").read_text())
    return [attend.table(result), attend.error_table(result)]


@pytest.mark.parametrize("name", ["training.md", "error_budgets.md", "attend.md"])
def test_tables_are_those_of_the_stored_figures(name):
    text = (ROOT / "docs" / name).read_text()
    for part in made_of(name):
        assert part in text, "write the page again: python -m benchmarks.<name> --page"


def test_the_example_of_attend_trains_like_attention_written_out():
    from examples import meanflow

    options = argparse.Namespace(steps=3, batch=2, points=8, device="cpu")
    curves = [meanflow.train(f, options) for f in (meanflow.ls.attend, meanflow.written_out)]
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-5
    assert curves[0][0] != curves[0][-1]


# Names: paths, modules, attributes, commands and options


@cache
def exists(name: str) -> bool:
    """Whether a dotted name is a module, or what one holds."""
    package, *rest = name.split(".")
    module = importlib.import_module("lipscope" if package == "ls" else package)
    for i, part in enumerate(rest):
        try:
            module = getattr(module, part)
        except AttributeError:
            if not hasattr(module, "__path__"):
                return False
            full = f"{module.__name__}.{part}"
            if package in ("tests", "benchmarks"):  # a program: importing it may take long
                found = importlib.util.find_spec(full)
                return found is not None and (i == len(rest) - 1 or part != rest[-1])
            if importlib.util.find_spec(full) is None:
                return False
            module = importlib.import_module(full)
    return True


def unknown_names(text: str) -> list[str]:
    """The paths and dotted names of a page that do not exist, diffs aside."""
    text = re.sub(r"^```diff\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    start = r"(?<![\w./-])"
    paths = re.findall(start + r"((?:lipscope|tests|benchmarks|examples|docs)/[\w./-]*\w)", text)
    wrong = [path for path in paths if not (ROOT / path).exists()]
    names = re.findall(start + r"((?:lipscope|ls|tests|benchmarks)(?:\.[A-Za-z_]\w*)+)", text)
    wrong += [name for name in names if not exists(name)]
    for name, file in re.findall(r"`(\w+)[\w.]*` in `((?:lipscope|tests)/[\w/]+\.py)`", text):
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text()):
            wrong.append(f"{name} in {file}")
    return wrong


def wrong_command_lines(text: str) -> list[str]:
    """The command lines of lipscope, in blocks or indented, that would be refused."""
    fenced = re.findall(r"^```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ") for block in fenced for line in block.splitlines()]
    lines += [line[4:] for line in text.splitlines() if line.startswith("    lipscope ")]
    wrong = []
    for line in lines:
        if line.startswith("lipscope "):
            verb, *words = shlex.split(line.removeprefix("lipscope "), comments=True)
            try:
                VERBS[verb].make_context(verb, words)
            except Exception as error:  # typer has no public name for what its parser raises
                wrong.append(f"{line}: {error}")
    return wrong


@cache
def options() -> dict[str, frozenset[str]]:
    """The options of each verb; of no verb, also those of benchmarks, tests and the Makefile."""
    files = [ROOT / "Makefile", *(ROOT / "tests").rglob("*.py")]
    files += [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    own = {verb: {o for p in command.params for o in p.opts} for verb, command in VERBS.items()}
    own = {verb: names | {"--help"} for verb, names in own.items()}
    programs = re.findall(r"--[a-z][\w-]+", "".join(file.read_text() for file in files))
    every = {"--version", "--install-completion"}.union(programs, *own.values())
    return {"": frozenset(every)} | {verb: frozenset(names) for verb, names in own.items()}


def wrong_options(text: str) -> list[str]:
    """Verbs and options between backticks that do not exist."""
    wrong = []
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
        verb = re.match(r"lipscope ([a-z][\w-]*)|", code)[1] or ""
        if verb not in options():
            wrong.append(code)
            continue
        named = re.findall(r"(?<![\w-])--[a-z][\w-]+", code)
        wrong += [f"{option} in {code}" for option in named if option not in options()[verb]]
    return wrong


@pytest.mark.parametrize("check", [unknown_names, wrong_command_lines, wrong_options])
def test_what_pages_name_exists(check):
    # In one test, so that the quick tests see every page.
    found = {page.relative_to(ROOT).as_posix(): check(page.read_text()) for page in PAGES}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}


def main() -> None:
    """Run every notebook and store its outputs."""
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
