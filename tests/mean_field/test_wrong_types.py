"""What is neither a measure nor attention gets a letter: in a process of its own, for pytest checks types itself."""

import subprocess
import sys

SCRIPT = """
import torch
import lipscope as ls
from lipscope.mean_field.attention_on_measures import derivative
from lipscope.mean_field.hardy import averaging
from lipscope.mean_field.splitting_maps import largest_gain, splitting_map
from lipscope.mean_field.upper_bounds import d_p_bound, w2_bound

one, other = torch.ones(1, 1), torch.nn.Linear(1, 1)
f, mu = ls.SelfAttention(one, one, one), ls.Measure.uniform(one)
for case in (
    lambda: ls.push(f, one),
    lambda: derivative(f, one),
    lambda: ls.wasserstein(mu, one),
    lambda: ls.conditional_distance(one, mu),
    lambda: ls.Measure([[0.0]], one[0]),
    lambda: ls.Measure(one, [1.0]),
    lambda: ls.Measure.uniform([0.0]),
    lambda: mu.split(1.5),
    lambda: ls.push(other, mu),
    lambda: ls.splitting(other, mu),
    lambda: ls.splitting(f, [[0.0]]),
    lambda: ls.local_lipschitz(other, mu),
    lambda: ls.two_diracs(other, 1.0),
    lambda: ls.transition(other, 1.0, 10),
    lambda: w2_bound(other, 1.0),
    lambda: d_p_bound(other, 1.0),
    lambda: splitting_map(other, one[0]),
    lambda: largest_gain(other, 2, 1.0),
    lambda: averaging(1.5),
):
    try:
        print("accepted", case())
    except ls.UserError as error:
        print("letter", error)
"""


def test_every_wrong_type_gets_a_letter():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    letters = done.stdout.splitlines()
    assert len(letters) == 19 and all(line.startswith("letter ") for line in letters), done.stdout
    assert sum("a Measure is expected, got Tensor; Measure.uniform(X) makes one" in line for line in letters) == 4
    assert sum("must be a SelfAttention" in line and "got Linear" in line for line in letters) == 9
