"""How large is the package, and how far does a call travel? python -m tests.meter

Size: lines, files, private functions used once in their file, long functions, tuple assignments,
files that register hooks. Travel: the distinct functions and files of lipscope that a second, warm
call touches. `tests/test_hops.py` asserts that the counts only fall.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "lipscope"
LONG = 60
HOOK = re.compile(r"register_(full_)?(forward|backward)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def used_once(tree: ast.Module) -> tuple[int, int]:
    """Private functions of a file that are named once in it, and all private functions."""
    names = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    )
    private = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, Function) and re.match(r"_(?!_)", node.name)
    ]
    return sum(names[name] == 1 for name in private), len(private)


def pairs(tree: ast.Module) -> int:
    """Assignments of several values to several names in one line."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        for node in ast.walk(tree)
    )


def size() -> dict[str, int]:
    """Count what makes a package hard to read."""
    count: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        place = "papers " if path.relative_to(PACKAGE).parts[0] == "papers" else ""
        once, private = used_once(tree)
        count[f"{place}lines"] += text.count("\n")
        count[f"{place}files"] += 1
        count["private functions"] += private
        count["private functions used once"] += once
        count["tuple assignments"] += pairs(tree)
        count["files that register hooks"] += bool(HOOK.search(text))
        count[f"functions over {LONG} lines"] += sum(
            isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= LONG
            for node in ast.walk(tree)
        )
    return dict(count)


def travelled(call: Callable[[], Any]) -> tuple[int, int]:
    """Functions and files of lipscope that a call touches when it is made a second time."""
    call()
    seen: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # Lambdas and comprehensions are parts of the function around them.
        if event == "call" and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    own = {(file, name) for file, name in seen if file.startswith(str(PACKAGE))}
    return len(own), len({file for file, name in own})


def calls() -> dict[str, Callable[[], Any]]:
    """Small calls of the main functions."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    import lipscope as ls

    torch.manual_seed(0)
    attention = ls.SelfAttention(*torch.randn(3, 16, 32, dtype=torch.float64))
    tokens = torch.randn(64, 32, dtype=torch.float64)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaModel(config).eval()
    ids = torch.arange(64)
    q = torch.randn(1, 2, 8, 16)
    return {
        "local_lipschitz": lambda: ls.local_lipschitz(attention, tokens),
        "bounds": lambda: ls.bounds(attention, ls.Ball(R=2.0, n=64)),
        "measure": lambda: ls.measure(model, ids, lengths=[8, 16], samples=1),
        "error_budget": lambda: ls.error_budget(model, ids.view(2, 32), formats="bf16,int8"),
        "attend": lambda: torch.func.jvp(ls.attend, (q, q, q), (q, q, q)),
    }


def main() -> None:
    for name, number in size().items():
        print(f"{name}: {number}")
    for name, call in calls().items():
        functions, files = travelled(call)
        print(f"{name}: {functions} functions in {files} files")


if __name__ == "__main__":
    main()
