"""Arguments of the wrong type are explained; in a subprocess, as pytest checks types itself."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch
import lipscope as ls
from lipscope.mean_field.measures import derivative
from lipscope.mean_field.duplication import jump_ratio
from lipscope.mean_field.upper_bounds import averaging
from lipscope.mean_field.duplication import largest_gain, splitting_map
from lipscope.mean_field.upper_bounds import d_p_bound, w2_bound, w_p_bound

one, other = torch.ones(1, 1), torch.nn.Linear(1, 1)
f, mu = ls.SelfAttention(one, one, one), ls.mean_field.DiscreteMeasure.uniform(one)
causal = ls.mean_field.DiscreteMeasure.uniform(one, causal=True)
for case in (
    lambda: ls.mean_field.push(f, one),
    lambda: derivative(f, one),
    lambda: ls.mean_field.wasserstein(mu, one),
    lambda: ls.mean_field.conditional_distance(one, mu),
    lambda: ls.mean_field.DiscreteMeasure([[0.0]], one[0]),
    lambda: ls.mean_field.DiscreteMeasure(one, [1.0]),
    lambda: ls.mean_field.DiscreteMeasure.uniform([0.0]),
    lambda: mu.split(1.5),
    lambda: ls.mean_field.push(other, mu),
    lambda: ls.mean_field.splitting(other, mu),
    lambda: ls.mean_field.splitting(f, [[0.0]]),
    lambda: ls.local_lipschitz(other, mu),
    lambda: ls.mean_field.two_diracs(other, 1.0),
    lambda: ls.mean_field.transition(other, 1.0, 10),
    lambda: w2_bound(other, 1.0),
    lambda: d_p_bound(other, 1.0),
    lambda: splitting_map(other, one[0]),
    lambda: largest_gain(other, 2, 1.0),
    lambda: averaging(1.5),
    lambda: averaging(3, "2"),
    lambda: ls.mean_field.wasserstein(mu, mu, "2"),
    lambda: ls.mean_field.wasserstein(mu, mu, None),
    lambda: ls.mean_field.wasserstein(mu, mu, True),
    lambda: ls.mean_field.conditional_distance(causal, causal, "2"),
    lambda: w_p_bound(f, 1.0, "2"),
    lambda: d_p_bound(ls.SelfAttention(one, one, one, causal=True), 1.0, "2"),
    lambda: jump_ratio(f, mu, 0, [0.0], 0.5),
    lambda: jump_ratio(f, mu, 0.0, 2 * one, 0.5),
    lambda: jump_ratio(f, mu, 0, 2 * one, "0.5"),
    lambda: jump_ratio(f, one, 0, 2 * one, 0.5),
):
    try:
        print("accepted", case())
    except ls.UserError as error:
        print("refused", error)
"""


@pytest.mark.wide
def test_every_wrong_type_is_explained():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    errors = done.stdout.splitlines()
    assert len(errors) == 30 and all(line.startswith("refused ") for line in errors), done.stdout
    assert (
        sum(
            "expected a DiscreteMeasure, got Tensor; DiscreteMeasure.uniform(X) makes one" in line
            for line in errors
        )
        == 5
    )
    assert sum("must be a SelfAttention" in line and "got Linear" in line for line in errors) == 9
    assert sum("p must be a number, at least 1" in line for line in errors) == 7
