"""Rows that cannot be true are refused; jobs know what they owe."""

import math

import pytest

from lipscope.study.records import COLUMNS, Identity, Job
from tests.study.fakes import IDENTITY, row


def test_columns_are_frozen():
    assert ",".join(COLUMNS) == (
        "probe,scope,layer,head,n,sample,kind,norm,value,lower,upper,residual,status,radius,dtype,device,seconds"
    )


def test_a_true_row_passes():
    assert row().check() == row()
    assert row(value=0.0, lower=0.0, upper=math.inf).check()
    assert row(value=math.nan, lower=0.0, upper=math.inf, status="overflow").check()
    assert row(
        value=math.nan, lower=0.0, upper=math.inf, status="failed: the worker was killed by SIGKILL"
    ).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"lower": 3.0},
        {"upper": 1.0},
        {"lower": math.nan},
        {"upper": math.nan},
        {"value": math.nan},
        {"value": math.nan, "status": "max_steps"},
    ],
)
def test_an_impossible_row_is_refused(changes):
    with pytest.raises(ValueError, match=r"lower <= value <= upper|promises a value"):
        row(**changes).check()


def test_a_job_owes_a_row_per_scope_head_and_sample():
    job = Job(16, (0, 2), 1, ("heads", "attention"), (0, 3))
    assert job.targets() == [
        ("heads", 1, 0, 16, 0), ("heads", 1, 0, 16, 2),
        ("heads", 1, 3, 16, 0), ("heads", 1, 3, 16, 2),
        ("attention", 1, None, 16, 0), ("attention", 1, None, 16, 2),
    ]  # fmt: skip
    failed = job.failed_rows("out of\n memory", "float32", "cuda")
    assert [r[1:6] for r in failed] == job.targets()
    assert {r.status for r in failed} == {"failed: out of memory"}
    assert all(
        r.check().failing and math.isnan(r.value) and (r.lower, r.upper) == (0.0, math.inf)
        for r in failed
    )


def test_identity_names_its_differences():
    assert IDENTITY.differences(IDENTITY) == []
    changed = Identity(**{**vars(IDENTITY), "tol": 1e-3, "text": "y"})
    assert IDENTITY.differences(changed) == ["text", "tol"]
