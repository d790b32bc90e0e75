"""lipscope.fused needs torch, and Triton for its kernels: nothing else of lipscope or of others."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import sys

BLOCKED = set("transformers scipy ot matplotlib jaxtyping typer rich filelock platformdirs "
              "torchdiffeq safetensors tokenizers".split())


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
from lipscope import attend
import torch

q = torch.randn(1, 2, 5, 4, dtype=torch.float64)
o, do = torch.func.jvp(attend, (q, q, q), (q, q, q))
assert o.shape == do.shape == q.shape
assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}
"""


def test_attend_works_where_nothing_but_torch_is_installed():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-1000:]


def test_fused_imports_torch_triton_and_itself():
    allowed = {"torch", "triton", "lipscope", "__future__"} | set(sys.stdlib_module_names)
    for path in (ROOT / "lipscope" / "fused").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("lipscope") or name.startswith("lipscope.fused"), (
                    f"{path.name} imports {name}"
                )
