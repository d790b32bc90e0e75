"""One solve over several ranks: against the dense Jacobian, and against the solve of one process.

All ranks run once, in tests/attention/four_ranks.py; the tests look at what they found.
"""

import doctest
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

import lipscope as ls
from benchmarks import ranks
from lipscope.attention import sharded
from lipscope.linalg.space import TokenShards, chunks_of
from tests.attention.four_ranks import SIZES, long_enough, more
from tests.cases import KINDS
from tests.naive import dense_jacobian
from tests.once import once

ROOT = Path(__file__).resolve().parents[2]
CASES = [*sorted(KINDS.keys() - {"one token"}), *more(), "tiles"]
SEVERAL = [size for size in SIZES if size > 1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the four ranks leave what they find; ranks 1 and 3 end before the last chapter."""

    def run(place):
        command = [sys.executable, "-m", "tests.attention.four_ranks", str(place / "found")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        (place / "log").write_text(f"{done.returncode}\n{done.stderr[-3000:]}")

    return once(tmp_path_factory, "four ranks", run)


@pytest.fixture(scope="module")
def found(place):
    return [torch.load(place / f"found.{rank}", weights_only=False) for rank in range(4)]


def test_all_ranks_finish(place):
    log = (place / "log").read_text()
    assert log.startswith("0\n"), log


def flat(x) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64).nan_to_num(nan=-1.0)


def case(name):
    return long_enough(name) if name in KINDS else more()[name][:2]


@cache
def truth(name):
    """The dense Jacobian by autograd, its norm, and what rounding allows a product to be off by."""
    f, X = case(name)
    D = dense_jacobian(f.double(), X.double())
    true, tol = torch.linalg.matrix_norm(D, 2), 1e-12 if X.dtype == torch.float64 else 1e-5
    return D, true, max(tol, float(ls.jacobian(f, X).stated_rounding.max())) * float(true)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_the_plain_solve_bit_by_bit(found, name):
    plain, one = found[0]["solves"][None][name], found[0]["solves"][1][name]
    for field in ("value", "lower", "upper", "residual", "steps", "right", "left", "JE", "JU"):
        assert torch.equal(flat(plain[field]), flat(one[field])), field
    assert plain["status"] == one["status"] and plain["missed"] == one["missed"]


@pytest.mark.parametrize("size", SEVERAL)
@pytest.mark.parametrize("name", CASES)
def test_several_ranks_give_the_same_numbers_to_rounding(found, name, size):
    plain, e = found[0]["solves"][None][name], found[0]["solves"][size][name]
    assert e["status"] == plain["status"]
    value, exact = flat(plain["value"]), "float32" not in name
    eps = 1e-13 if exact else 2e-6
    assert ((flat(e["value"]) - value).abs() <= eps * value).all()
    # Krylov vectors that do not fit start again; each rank has memory of its own, so later.
    if name == "restarts":
        assert plain["steps"] > e["steps"] and torch.allclose(e["right"], plain["right"], atol=1e-8)
        return
    assert ((flat(e["lower"]) - flat(plain["lower"])).abs() <= 4 * eps * value).all()
    if exact:  # what the lower bound allows for rounding is stated for all tokens
        margin, stated = value - flat(e["lower"]), value - flat(plain["lower"])
        assert ((margin - stated).abs() <= 0.05 * stated + 1e-15 * value).all()
    # An upper bound contains the rounding that was seen, which is not the same twice.
    upper = flat(plain["upper"])
    assert torch.equal(upper.isinf(), flat(e["upper"]).isinf())
    off = (flat(e["upper"]) - upper)[upper.isfinite()].abs()
    assert (off <= 1e-4 * upper[upper.isfinite()]).all()
    assert torch.equal(flat(e["steps"]), flat(plain["steps"]))
    for field in ("right", "left"):
        assert (e[field] - plain[field]).abs().max() <= (1e-12 if exact else 1e-5), field


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name", [name for name in CASES if not re.search("batch|apart|tiles", name)]
)
def test_against_the_dense_jacobian(found, name, size):
    (D, true, tol), e = truth(name), found[0]["solves"][size][name]
    for product, x, matrix in (("JE", "E", D), ("JU", "U", D.T)):
        got, x = e[product].double().flatten(), e[x].double().flatten()
        assert (got - matrix @ x).norm() <= tol * x.norm(), product
    assert e["lower"] <= true * (1 + 1e-14) and true * (1 - 1e-14) <= e["upper"]


def test_all_ranks_return_the_same_numbers(found):
    for size in SEVERAL:
        for name in CASES:
            for rank in range(1, size):
                mine, zero = (found[r]["solves"][size][name] for r in (rank, 0))
                for field in ("value", "lower", "upper", "residual", "steps", "right"):
                    assert torch.equal(flat(mine[field]), flat(zero[field])), (size, name, field)


def test_local_lipschitz_takes_a_mesh(found):
    value, right = found[0]["called"][None]
    for size in SIZES:
        got, whole = found[0]["called"][size]
        assert got == pytest.approx(value, rel=1e-13)
        assert torch.allclose(whole, right, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "width", "members"),
    [
        # G (k + m) numbers per token: two heads of keys of size 4 and values of size 3.
        ("n = 4", 2 * (4 + 3), 1),
        ("n = 13", 2 * (4 + 3), 1),
        ("n = 37, window, rope", 2 * (4 + 3), 1),
        ("batch", 2 * (4 + 3), 2),
        ("heads apart", 4 * (4 + 3), 1),
        ("float32", 2 * (4 + 3), 1),
    ],
)
def test_the_traffic_of_a_product_is_the_formula(found, name, width, members, size):
    n = case(name)[1].shape[-2]
    per_number = 4 if "float32" in name else 8
    expected = (size - 1) * 2 * -(-n // (2 * size)) * members * width * per_number
    for rank in range(size):
        before, after_J, after_Jt = found[rank]["solves"][size][name]["sent"]
        J = {kind: after_J[kind] - before[kind] for kind in before}
        Jt = {kind: after_Jt[kind] - after_J[kind] for kind in before}
        assert {"gather": expected, "scatter": 0, "reduce": 0} == J
        assert Jt == {"gather": 0, "scatter": expected, "reduce": 0}
        # Before any product: keys and values at X, gathered once. A solve of single heads and one
        # of all gather the same.
        heads = 2 * (4 + 3)
        once = (size - 1) * 2 * -(-n // (2 * size)) * members * heads * per_number
        assert before["gather"] == once


def test_errors_reach_every_rank(found):
    said = found[0]["refused"]
    assert all(other["refused"] == said for other in found[1:])
    expected = {
        "NaN on rank 1": "rank 1: X holds nan at index [0, 0]",
        "the same tokens on all": "all 4 ranks have the same tokens; give each its own",
        "other counts": "has shapes (2, 6), (3, 6), (4, 6), (5, 6), but 14 tokens are spread as",
        "too few tokens": "1 tokens cannot be spread over 4 ranks; use at most 1 processes",
        "another map": "f is Linear, which is not known to act token by token",
        "another norm": "mesh solves for norm='2' only",
        "splitting": "mesh spreads tokens, not measures",
        "short tables": "does not cover 13 tokens; use Rope.standard(13, 4)",
        "a mask of this rank's tokens": "mask must have shape (13, 13)",
        "no mesh": "mesh must be a torch.distributed.DeviceMesh or a process group, got int",
        "a plane": "mesh must have one dimension",
    }
    assert said.keys() == expected.keys()
    for name, part in expected.items():
        assert part in said[name], said[name]
        assert not said[name].endswith(".") and "\n" not in said[name]


def test_a_rank_that_ends_or_hangs_ends_the_others(found):
    hung, gone = found[0]["lost"], found[2]["lost"]
    for line in (hung, gone):
        assert re.search(r"another rank ended or does not answer \(.*\); start all processes", line)
        assert "\n" not in line and "/" not in line
    assert 3 <= float(hung.split()[0]) <= 8  # the timeout of the group, 4 s
    assert float(gone.split()[0]) <= 3  # at once


def test_examples_run():
    assert doctest.testmod(sharded).failed == 0


def test_no_mesh_without_processes():
    with pytest.raises(ls.UserError, match="start them with torchrun"):
        sharded.group_of(None)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_token_belongs_to_one_rank_and_work_is_even(size):
    for n in (*range(size, 6 * size), 1000, 1001):
        shards = [TokenShards(n, size, rank) for rank in range(size)]
        assert torch.equal(torch.cat([r.positions for r in shards]).sort().values, torch.arange(n))
        counts = [len(r.positions) for r in shards]
        assert min(counts) >= 1 and max(counts) - min(counts) <= 2
        # Pairs (query, key) under a causal mask: even up to the rounding of chunks.
        pairs = [int((r.positions + 1).sum()) for r in shards]
        assert max(pairs) - min(pairs) <= 2 * n
        for r in shards:
            assert [tuple(chunk) for chunk in r.chunks] == chunks_of(n, size, r.rank)


def test_the_model_on_the_page_is_what_the_benchmark_prints(capsys):
    ranks.show_model()
    assert capsys.readouterr().out in (ROOT / "docs" / "scaling.md").read_text()


def test_the_model_has_the_traffic_of_the_formula():
    sent = ranks.modelled(1, 8, width=14)["GB_per_float32_product"]
    assert sent == 4 * (8 - 1) * 2 * (2**20 / 16) * 14 / 1e9


def torchrun(*arguments: str) -> list[str]:
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, "-m", *start, "-m", "lipscope", "measure", *arguments]


@pytest.mark.slow
def test_torchrun_measures_what_one_process_does_and_resumes_when_a_rank_is_killed(tmp_path):
    few = ("--lengths", "8,16", "--samples", "2", "--layers", "0,1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = [sys.executable, "-m", "lipscope", "measure", *few, "--out", str(tmp_path / "alone")]
    subprocess.run(alone, cwd=ROOT, check=True, capture_output=True, env=environment)
    command = torchrun(*few, "--out", str(tmp_path / "ranks"))
    running = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
    )
    store = tmp_path / "ranks"
    while not (store.exists() and len(ls.Study.open(store).rows) > 0):
        assert running.poll() is None
        time.sleep(0.2)
    os.kill(follower_of(running.pid), signal.SIGKILL)
    _, stderr = running.communicate(timeout=300)
    assert running.returncode != 0
    assert len([line for line in stderr.splitlines() if line.startswith("lipscope: ")]) <= 2
    kept = len(ls.Study.open(store).rows)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    studies = [ls.Study.open(tmp_path / name) for name in ("alone", "ranks")]
    ours, theirs = ({row[1:6]: row for row in study.sigma} for study in studies)
    assert ours.keys() == theirs.keys() and 0 < kept <= len(theirs)
    for key, row in ours.items():
        assert theirs[key].value == pytest.approx(row.value, rel=1e-12)
        assert theirs[key].lower == pytest.approx(row.lower, rel=1e-10)
        assert theirs[key].upper == pytest.approx(row.upper, rel=1e-3)


def follower_of(pid: int) -> int:
    """The process of rank 1 among the children of torchrun."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError("no rank 1")
