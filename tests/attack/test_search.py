"""What a search finds is measured from a start independent of the search, reproducibly."""

import pytest
import torch

import lipscope as ls
from lipscope._types import Around, Ball
from lipscope.attack.ascent import Climb, ascend
from lipscope.attack.perturbation import singular_response
from lipscope.attack.search import Normed, measured
from lipscope.linalg.spectral import fresh_seed, spectral_norm

CLIMB = Climb(steps=2, restarts=1, seed=5)


@pytest.fixture
def seeds(monkeypatch) -> list[int | None]:
    """The seed of every solve from a random start, in the order of the solves."""
    used: list[int | None] = []

    def recording(J, tol=1e-6, *, gap=None, start=None, solver=None):
        if start is None:
            used.append(None if solver is None else solver.seed)
        return spectral_norm(J, tol, gap=gap, start=start, solver=solver)

    for place in ("lipscope.attack.ascent", "lipscope.linalg.local"):
        monkeypatch.setattr(f"{place}.spectral_norm", recording)
    return used


def layer(d: int) -> ls.SelfAttention:
    g = torch.Generator().manual_seed(0)
    return ls.SelfAttention(
        *(torch.randn(3, d, generator=g, dtype=torch.float64) for _ in range(3))
    )


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("f", "domain"),
    [
        (layer(6), Ball(1.5, 4)),
        (layer(12), Ball(1.5, 4)),  # climbed in fewer dimensions
        (layer(6), Around(tokens(4, 6), 0.3)),
        (layer(6), Normed(tokens(6).abs(), 4)),
        (torch.sin, Around(tokens(4, 6), 0.3)),
    ],
    ids=["ball", "fewer dimensions", "around", "normed", "any map"],
)
def test_an_ascent_is_not_measured_with_a_seed_it_climbed_with(f, domain, seeds):
    found = ascend(f, domain, CLIMB)
    *climbed, last = seeds
    if found.X.shape[1] == 12:
        # The climb in fewer dimensions is measured too, with nothing chosen by it.
        climbed.remove(last)
    assert climbed and None not in seeds
    assert last not in {*climbed, CLIMB.seed} and last == fresh_seed(CLIMB.seed, "measure")
    assert found.sigma.confidence > 0 and found.sigma.upper < float("inf")
    again = ascend(f, domain, CLIMB)
    assert (again.sigma.lower, again.sigma.upper) == (found.sigma.lower, found.sigma.upper)


def test_given_inputs_are_not_measured_with_the_seed_they_may_have_been_drawn_with(seeds):
    f, X = layer(6), tokens(4, 6)
    singular_response(f, X, seed=5)
    measured(f, [("one", X)], seed=5)
    ls.attack.explicit_inputs(f, Ball(1.0, 4), seed=5)
    assert seeds == [fresh_seed(5, "measure")] * 3
