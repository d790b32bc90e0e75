"""Integration that ends where the solution does, against solutions known in closed form."""

import math

import pytest
import torch

import lipscope as ls
from lipscope.dynamics.integration import Ending, integrate

TIMES = torch.linspace(0, 2, 21, dtype=torch.float64)


def start(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_an_exponential():
    path = integrate(lambda t, y: y, start(1.0, -2.0), TIMES, rtol=1e-10, atol=1e-10)
    assert path.ending is Ending.FINISHED and torch.equal(path.times, TIMES)
    assert torch.allclose(path.states, TIMES.exp()[:, None] * start(1.0, -2.0), rtol=1e-8)


def test_a_pole_stops_the_path_with_its_time():
    """dy/dt = y^2 from 1 is 1/(1 - t)."""
    path = integrate(lambda t, y: y * y, start(1.0), TIMES, rtol=1e-8, atol=1e-8)
    assert path.ending in (Ending.STALLED, Ending.OVERFLOW)
    assert path.times[-1].item() == pytest.approx(1, abs=1e-6)
    assert len(path.times) >= 11 and torch.equal(path.times[:-1], TIMES[: len(path.times) - 1])
    assert torch.allclose(path.states[:10, 0], 1 / (1 - TIMES[:10]), rtol=1e-6)
    assert path.states.isfinite().all()


def test_a_field_that_turns_nan_stops_the_path():
    path = integrate(
        lambda t, y: y * (math.nan if t > 0.5 else 1.0), start(1.0), TIMES, rtol=1e-6, atol=1e-6
    )
    assert path.ending is Ending.OVERFLOW and path.times[-1] <= 0.5
    assert path.states.isfinite().all() and len(path.times) == len(path.states)


def test_a_field_that_is_nan_at_once_leaves_the_start():
    path = integrate(lambda t, y: y * math.nan, start(1.0), TIMES, rtol=1e-6, atol=1e-6)
    assert path.times.tolist() == [0.0] and path.states.tolist() == [[1.0]]


def test_exhausted_steps_keep_what_was_reached():
    path = integrate(
        lambda t, y: 30 * torch.cos(30 * t * y),
        start(1.0),
        TIMES,
        rtol=1e-9,
        atol=1e-9,
        max_steps=40,
    )
    assert path.ending is Ending.MAX_STEPS and path.steps == 40 and 0 < path.times[-1] < 2


def test_a_watch_ends_the_path_at_a_state_it_saw():
    seen = []

    def watch(t: float, y: torch.Tensor) -> Ending | None:
        seen.append(t)
        return Ending.BLOW_UP if y.max() > 3 else None

    path = integrate(lambda t, y: y, start(1.0), TIMES, rtol=1e-6, atol=1e-6, watch=watch)
    assert path.ending is Ending.BLOW_UP and path.times[-1].item() == seen[-1]
    assert (
        path.states[-1].item() == pytest.approx(math.exp(seen[-1]), rel=1e-5)
        and path.states[-1] > 3
    )


def test_one_token_among_many_is_as_accurate_as_alone():
    """A root mean square over 10,000 components would allow a 100 times larger error in one."""
    still = torch.zeros(10_000, dtype=torch.float64)
    rate = still.clone()
    rate[0] = 5.0
    path = integrate(lambda t, y: torch.cos(rate * t) * rate, still, TIMES, rtol=1e-6, atol=1e-6)
    assert path.states[-1, 0].item() == pytest.approx(math.sin(10), abs=2e-5)


def test_progress_runs_to_the_end():
    told = []
    integrate(
        lambda t, y: y,
        start(1.0),
        TIMES,
        rtol=1e-4,
        atol=1e-4,
        progress=lambda done, total: told.append(done),
    )
    assert told == sorted(told) and told[-1] == 2


@pytest.mark.parametrize(
    ("options", "told"), [({"rtol": 0.0}, "tolerance"), ({"max_steps": 0}, "max_steps")]
)
def test_refusals(options, told):
    with pytest.raises(ls.UserError, match=told):
        integrate(lambda t, y: y, start(1.0), TIMES, **({"rtol": 1e-6, "atol": 1e-6} | options))
