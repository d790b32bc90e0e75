"""Rows that cannot be true are refused."""

import math

import pytest

from lipscope.study.records import COLUMNS, Fingerprint
from tests.study.fakes import IDENTITY, row


def test_columns_are_frozen():
    assert ",".join(COLUMNS) == (
        "probe,scope,layer,head,n,sample,kind,norm,value,lower,upper,residual,status,radius,dtype,device,seconds,reason,extra"
    )


def test_a_true_row_passes():
    assert row().check() == row()
    assert row(value=0.0, lower=0.0, upper=math.inf).check()
    assert row(value=math.nan, lower=0.0, upper=math.inf, status="overflow").check()
    assert row(value=math.nan, lower=0.0, upper=math.inf, status="failed").check()


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


def test_identity_names_its_differences():
    assert IDENTITY.differences(IDENTITY) == []
    changed = Fingerprint(**{**vars(IDENTITY), "tol": 1e-3, "text": "y"})
    assert IDENTITY.differences(changed) == ["text", "tol"]
