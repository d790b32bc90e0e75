"""Planted bugs, each of which the suite must kill: python -m tests.mutants

A mutant is one edit of one file, made in a copy of the project; the tests named with it must then fail. A mutant whose
text is gone from the source, or that survives, fails the command.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """What the bug is, where, the text replaced and by what, and the tests that see it."""

    bug: str
    file: str
    old: str
    new: str
    tests: str


CORE, ATTENTION, BOUNDS = "tests/linalg", "tests/attention", "tests/theorems"

MUTANTS = (
    Mutant(
        "jvp's output for its tangent, as in the first paper's code",
        "lipscope/attention/primitive.py",
        "return _Jvp.apply(q, k, v, dq, dk, dv, o, lse, mask, padding, sinks, ctx.rules).to(o.dtype), None",
        "return o.clone(), None",
        f"{ATTENTION}/test_primitive.py",
    ),
    Mutant(
        "missing output projection",
        "lipscope/attention/linearization.py",
        "        return joined if self.O is None else joined @ self.O.T",
        "        return joined",
        f"{ATTENTION}/test_linearization.py",
    ),
    Mutant(
        "row sum left out of the tangent",
        "lipscope/attention/reference.py",
        "dP = W.P * (dS - (W.P * dS).sum(-1, keepdim=True))",
        "dP = W.P * dS",
        f"{ATTENTION}/test_linearization.py",
    ),
    Mutant(
        "weights of the heads forgotten on one side of the product",
        "lipscope/theorems/kim2021.py",
        "rights.append(h.factor * m * h.one.Q)",
        "rights.append(h.factor * h.one.Q)",
        BOUNDS,
    ),
    Mutant(
        "far queries left out of a column of L2 attention",
        "lipscope/theorems/distance_columns.py",
        "size * cut + others * divided * math.exp(-cut - 1)",
        "size * cut",
        f"{BOUNDS}/test_distance_columns.py",
    ),
    Mutant(
        "column sums below what climbing finds",
        "lipscope/theorems/distance_columns.py",
        "math.sqrt(seen.regard * (seen.others + 1))",
        "0.6 * math.sqrt(seen.others + 1)",
        f"{BOUNDS}/test_distance_columns.py",
    ),
    Mutant(
        "softcap's second derivative dropped",
        "lipscope/attention/reference.py",
        "        on_T = on_T + W.bend * dT * on_dS\n",
        "        pass\n",
        f"{ATTENTION}/test_primitive.py",
    ),
    Mutant(
        "a fully masked row is not zero",
        "lipscope/attention/reference.py",
        "    Z = Z.masked_fill(Z == 0, torch.inf)\n",
        "",
        f"{ATTENTION}/test_layer.py",
    ),
    Mutant(
        "causal order off by one",
        "lipscope/attention/pattern.py",
        "seen = j <= i if self.causal else None",
        "seen = j < i if self.causal else None",
        f"{ATTENTION}/test_primitive.py",
    ),
    Mutant(
        "heads in the wrong order when taken apart",
        "lipscope/attention/linearization.py",
        "W=W.repeat(copies, 1, 1)",
        "W=W.flip(0).repeat(copies, 1, 1)",
        f"{ATTENTION}/test_linearization.py",
    ),
    Mutant(
        "stop on nothing",
        "lipscope/linalg/spectral.py",
        "residual = basis.b * p[:, -1].abs() / theta",
        "residual = 0 * theta",
        f"{CORE}/test_spectral.py",
    ),
    Mutant(
        "no reorthogonalisation",
        "lipscope/linalg/golub_kahan.py",
        "        for _ in range(2 if self.restarted else 1):",
        "        for _ in range(0):",
        f"{CORE}/test_golub_kahan.py",
    ),
    Mutant(
        "no prescaling",
        "lipscope/linalg/golub_kahan.py",
        "self.scale = torch.ldexp(torch.ones_like(largest), -exponent)",
        "self.scale = torch.ones_like(largest)",
        f"{CORE}/test_spectral.py",
    ),
    Mutant(
        "failure probability forgotten in the upper bound",
        "lipscope/linalg/certificate.py",
        "return failure * math.sqrt(math.pi / (2 * (size - 1)))",
        "return math.sqrt(math.pi / (2 * (size - 1)))",
        f"{CORE}/test_certificate.py",
    ),
    Mutant(
        "rounding forgotten in the upper bound",
        "lipscope/linalg/certificate.py",
        "    source = 3 * rounding\n",
        "    source = 0 * rounding\n",
        f"{CORE}/test_certificate.py",
    ),
    Mutant(
        "a given start believed to be random",
        "lipscope/linalg/spectral.py",
        "run = _Run(J, tol, gap, solver, random=start is None)",
        "run = _Run(J, tol, gap, solver, random=True)",
        f"{CORE}/test_spectral.py",
    ),
    Mutant(
        "max for sum in the infinity-norm",
        "lipscope/linalg/infinity.py",
        "sums = rows.double().abs().sum(dim=-1).cpu()",
        "sums = rows.double().abs().amax(dim=-1).cpu()",
        f"{CORE} {BOUNDS}",
    ),
    Mutant(
        "dropped sqrt(n) in Castin et al.'s bound",
        "lipscope/theorems/castin2024.py",
        "math.hypot(a.query, 2 * math.sqrt(n) * a.key, math.sqrt(n))",
        "math.hypot(a.query, 2 * a.key, 1.0)",
        BOUNDS,
    ),
    Mutant(
        "first power of the query weights in the L2 bound",
        "lipscope/theorems/kim2021.py",
        "    return up((norm(M) + rest) * norm(h.one.Q))",
        "    return up(norm(M) + rest)",
        BOUNDS,
    ),
    Mutant(
        "untied L2 attention offered a constant",
        "lipscope/theorems/kim2021.py",
        "lambda f, _: f.groups == f.heads and torch.equal(f.Q, f.K) and _tied_biases(f),",
        "lambda f, _: True,",
        BOUNDS,
    ),
    Mutant(
        "mean for max in the input-dependent bound",
        "lipscope/theorems/local.py",
        "    return up(abs(h.scale) * norms.max().item())\n\n\ndef _key_term",
        "    return up(abs(h.scale) * norms.mean().item())\n\n\ndef _key_term",
        BOUNDS,
    ),
    Mutant(
        "a length through float32 in a lower bound",
        "lipscope/theorems/castin2024.py",
        "lengths = torch.tensor([_value_length(h, u) for u in units], dtype=torch.float64)",
        "lengths = torch.tensor([_value_length(h, u) for u in units]).double()",
        f"{BOUNDS}/test_castin2024.py",
    ),
    Mutant(
        "norm rounded down",
        "lipscope/theorems/rounding.py",
        "return torch.ldexp(square.sqrt() * (1 + 4 * U), size[..., 0, 0])",
        "return torch.ldexp(largest.sqrt() * (1 - 1e-11), size[..., 0, 0])",
        f"{BOUNDS}/test_certified.py",
    ),
    Mutant(
        "second derivative forgotten in the certified ball",
        "lipscope/theorems/certified.py",
        "return up(math.fsum(_finite(second_derivative, x, rho) for rho in radii) * r / STEPS)",
        "return 0.0",
        BOUNDS,
    ),
)


def killed(mutant: Mutant, copy: Path) -> bool:
    """Plant it, run its tests, take it out again."""
    path = copy / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.file} holds the text of {mutant.bug!r} {source.count(mutant.old)} times, not once")
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "2",
            "-p",
            "no:cacheprovider",
            *mutant.tests.split(),
        ]
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        return run.returncode != 0 and " failed" in run.stdout
    finally:
        path.write_text(source)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "lipscope"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.html", "*.png"))
        alive = [m.bug for m in MUTANTS if not _told(m, killed(m, copy))]
    print(f"{len(MUTANTS) - len(alive)} passed, {len(alive)} failed")
    if alive:
        raise SystemExit(f"survived: {'; '.join(alive)}")


def _told(mutant: Mutant, dead: bool) -> bool:
    print(f"{'killed  ' if dead else 'SURVIVED'}  {mutant.bug}", flush=True)
    return dead


if __name__ == "__main__":
    main()
