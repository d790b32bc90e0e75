"""The Python on every page runs as it stands and gives the output and the numbers beside it.

The blocks of a page run one after the other in one namespace. A block that the tests cannot run
carries the comment `<!-- not run: reason -->` on the line before it. A block of text right after a
block of Python is its output; a comment with four decimals is the value of its expression.
"""

import ast
import re
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from lipscope.cli.commands import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- not run:(?P<reason>[^\n]*)-->\n)?"
    r"^```python\n(?P<code>.*?)^```$"
    r"(?:\n\s*^```text\n(?P<output>.*?)^```$)?",
    flags=re.DOTALL | re.MULTILINE,
)
VALUE = re.compile(r"#\s+(\d+\.\d{4})\b")
NUMBER = r"\d+(?:\.\d+)?"


@dataclass(frozen=True)
class Block:
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


def test_the_readme_and_the_guides_have_python():
    names = {page.name for page in RUN}
    guides = {"choosing.md", "extending.md", "monitor.md", "dynamics.md"}
    assert {"README.md", "index.md", "tutorial.md"} | guides <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_block_that_is_not_run_has_a_reason(page):
    text = page.read_text()
    found = blocks(text)
    assert len(found) == text.count("```python"), "a block that is not found is not run"
    assert all(block.reason != "" for block in found), "say why the block is not run"
    reasons = [block.reason for block in found if block.reason is not None]
    assert len(reasons) == text.count("<!-- not run"), "the comment belongs right before a block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_named_on_a_page_exist(page):
    text = re.sub(r"^```diff\n.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"\b((?:lipscope|tests|benchmarks|examples|docs)/[\w/]+\.\w+)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    for name, file in re.findall(r"`(\w+)[\w.]*` in `((?:lipscope|tests)/[\w/]+\.py)`", text):
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{name} is not in {file}"


def commands(page: str) -> list[str]:
    """The command lines of lipscope in the blocks of a page, fenced or indented."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line[4:] for line in page.splitlines() if line.startswith("    lipscope ")]
    found = [line.removeprefix("$ ") for line in lines]
    return [line.removeprefix("lipscope ") for line in found if line.startswith("lipscope ")]


def parse(line: str) -> None:
    """Read a command line as lipscope would, without running it."""
    verb, *words = shlex.split(line, comments=True)
    verbs = get_command(app).commands
    assert verb in verbs, f"lipscope {verb} does not exist"
    try:
        verbs[verb].make_context(verb, words)
    except Exception as error:  # typer has no public name for what its parser raises
        raise AssertionError(f"lipscope {line}: {error}") from None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_on_a_page_are_valid(page):
    for line in commands(page.read_text()):
        parse(line)


def test_a_wrong_command_line_is_seen():
    page = "    lipscope show DIR\n\n```\n$ lipscope doctor\n```\n\nlipscope takes words."
    assert commands(page) == ["doctor", "show DIR"]
    parse("measure bert-base-uncased --text my.txt --lengths 16,64   # a comment")
    for wrong in ("measure --length 16", "mesure", "attack --swaps three --kind tokens", "show"):
        with pytest.raises(AssertionError, match="lipscope"):
            parse(wrong)


def test_output_beside_python_is_seen():
    assert blocks("```python\nx\n```\n\n```text\n1\n```\n") == [Block("x\n", "1\n", None)]
    assert blocks("<!-- not run: a GPU -->\n```python\nx\n```\n") == [Block("x\n", "", "a GPU")]
    assert blocks("<!-- not run: -->\n```python\nx\n```\n") == [Block("x\n", "", "")]


@pytest.mark.parametrize(
    "stale", ["layer 0 52.92", "layer 0 53.0", "layer 1 52.90", "layer 0 -52.90", "head 0 52.90"]
)
def test_a_stale_number_in_the_output_is_seen(stale):
    assert_same_output("layer 0 52.9\n", "layer  0  52.91")
    with pytest.raises(AssertionError):
        assert_same_output("layer 0 52.90", stale)


def test_a_stale_number_in_a_comment_is_seen():
    run(Block("x = 1\nx + 1    # 2.0000: the sum\n", "", None), {}, "page")
    with pytest.raises(AssertionError):
        run(Block("x = 1\nx + 1    # 2.0001\n", "", None), {}, "page")
    with pytest.raises(AssertionError, match="beside no expression"):
        run(Block("for x in (): x    # 2.0000\n", "", None), {}, "page")
    with pytest.raises(AssertionError):
        run(Block("x = 2    # 2.0001\n", "", None), {}, "page")
