"""Clusters of renormalised tokens: where and when they form, and whether they span a polytope.

A cluster is a connected component of the graph that joins tokens closer than the tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree
from torch import Tensor

from lipscope._ambient import entry_point
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.dynamics.integration import Ending
from lipscope.dynamics.particles import Flow
from lipscope.linalg.differentiate import check_tensor

NOISE = 0.01
"""Smallest margin of a vertex, relative to the width: a chosen threshold, not a measured error."""


@dataclass(frozen=True, eq=False)
class Clusters(Displayed):
    """K clusters at the end of a flow, the heaviest first; all tensors are on the CPU.

    centres [K, d]: weighted means of the members
    masses [K]:     total weights
    labels [n]:     the cluster of each token
    radii [K]:      the largest distance of a member from its centre
    formed [K]:     the time of the flow after which all members stay within `width` of their
                    centre; infinite if they do not at the end
    counts [T]:     the number of clusters at each time of the flow
    width:          the tolerance as a length
    ending:         why the flow ended
    reached:        the time at which it ended
    """

    centres: Tensor
    masses: Tensor
    labels: Tensor
    radii: Tensor
    formed: Tensor
    counts: Tensor
    width: float
    ending: Ending
    reached: float

    def __len__(self) -> int:
        return len(self.masses)

    @property
    def time(self) -> float:
        """The time at which the last cluster formed."""
        return self.formed.max().item()

    @property
    def clear(self) -> bool:
        """Whether the tokens moved, every cluster is narrow, and there are fewer than tokens."""
        gathered = len(self) < len(self.labels) or len(self.labels) == 1
        return len(self.counts) > 1 and math.isfinite(self.time) and gathered

    @cached_property
    def margins(self) -> Tensor:
        """The 1-norm distance of each centre from the convex hull of the others; 0 inside it."""
        return hull_margins(self.centres)

    @property
    def extreme(self) -> Tensor:
        """Which centres are vertices of their convex hull, by a margin above NOISE * width."""
        return self.margins > NOISE * self.width

    @property
    def summary(self) -> str:
        groups = len(self)
        tokens = _counted(len(self.labels), "token")
        if not self.clear:
            named = _counted(groups, "group")
            said = f"no clear clusters: {named} of {tokens}, not all narrow at the end"
            if len(self.counts) == 1:
                said = f"no clear clusters: the flow has not moved from its {tokens}"
            elif groups == len(self.labels):
                said = f"no clear clusters: each of {tokens} is a group of its own"
        else:
            said = f"{_counted(groups, 'cluster')} of {tokens}, formed by t = {self.time:.4g}"
            if groups > 1:
                said += (
                    f"; {int(self.extreme.sum())} of {groups} are vertices of their convex hull "
                    f"(smallest margin {self.margins.min().item():.2g}, "
                    f"threshold {NOISE * self.width:.2g})"
                )
        if self.ending is not Ending.FINISHED:
            said += f"; the flow ended early, at t = {self.reached:.4g}"
        return said

    @property
    def title(self) -> str:
        """The summary in a few words."""
        return (
            f"{_counted(len(self), 'cluster')} at the end"
            if self.clear
            else f"no clear clusters: {_counted(len(self), 'group')}"
        )


@entry_point
def find_clusters(found: Flow, tol: float = 1e-2, *, renormalised: bool = True) -> Clusters:
    """Find the clusters of tokens at the end of a flow.

    Two tokens belong to the same cluster if a chain of tokens joins them whose links are shorter
    than tol times the largest distance of a token from the mean at the start.

    Args:
        found: The flow.
        tol: Relative length of a link, between 0 and 1.
        renormalised: Cluster z = e^{-tV} x instead of x.

    Returns:
        The clusters, the heaviest first; `summary` describes them in a sentence.

    Raises:
        UserError: If tol is out of range, or z overflows.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> eye = torch.eye(1, dtype=torch.float64)
        >>> X = torch.tensor([[-1.0], [-0.9], [0.8], [1.0]], dtype=torch.float64)
        >>> path = ls.dynamics.flow(ls.SelfAttention(eye, eye, eye), X, time=8.0)
        >>> len(ls.dynamics.find_clusters(path))
        2
    """
    if isinstance(tol, bool) or not isinstance(tol, int | float) or not 0 < tol < 1:
        raise UserError(
            f"tol, relative to the spread of the input, must lie between 0 and 1, got {tol!r}"
        )
    x = (found.renormalised if renormalised else found.positions).detach().double().cpu()
    check_tensor("the flow", x)
    equal = torch.full((x.shape[1],), 1 / x.shape[1], dtype=torch.float64)
    weights = equal if found.weights is None else found.weights.detach().double().cpu()
    # In units of the spread at the start: squares of lengths neither overflow nor vanish.
    middle = weights @ x[0]
    unit = max((x[0] - middle).abs().max().item(), torch.finfo(torch.float64).tiny)
    z = (x - middle) / unit
    check_tensor("the flow, relative to its spread at the start,", z)
    width = tol * z[0].norm(dim=1).max().item()
    labels = components(z[-1], width)
    counts = torch.tensor([int(components(frame, width).max()) + 1 for frame in z])
    masses = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add(0, labels, weights)
    # Relabel by mass, the heaviest first; argsort of a permutation is its inverse.
    labels = masses.argsort(descending=True, stable=True).argsort()[labels]
    radii, centres, masses = _radii(z, labels, weights)
    # The index after the last time at which a cluster is wide; len(times) means it never narrows.
    after = (torch.arange(1, len(z) + 1)[:, None] * (radii > width)).amax(dim=0)
    later = torch.cat([found.times, found.times.new_tensor([math.inf])])
    return Clusters(
        centres=middle + unit * centres[-1],
        masses=masses,
        labels=labels,
        radii=unit * radii[-1],
        formed=later[after],
        counts=counts,
        width=unit * width,
        ending=found.ending,
        reached=found.times[-1].item(),
    )


def components(points: Tensor, width: float) -> Tensor:
    """Return component labels of points [n, d] in the graph of links no longer than `width`."""
    # Points in one cell of a grid of diagonal width / 4 count as one. Links are accurate to that,
    # and a dense cluster costs no more than a few of its points.
    x = points.double().cpu().numpy()
    cells = np.floor((x - x.min(axis=0)) * (4 * math.sqrt(x.shape[1]) / width)) if width > 0 else x
    _, first, owner = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    # With wider indices, old versions of scipy number no component and raise nothing.
    pairs = cKDTree(x[first]).query_pairs(width, output_type="ndarray").astype(np.int32)
    graph = coo_array(
        (np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(first), len(first))
    )
    return torch.from_numpy(
        connected_components(graph, directed=False)[1][owner.reshape(-1)]
    ).long()


def hull_margins(points: Tensor) -> Tensor:
    """Return the 1-norm distance of each point [K, d] from the convex hull of the others."""
    # By the minimax theorem it is the maximum over |u|_inf <= 1 of the minimum over j != k of
    # <u, c_k - c_j>, where that is not negative: a linear program.
    C = points.double().cpu().numpy()
    d = C.shape[1]
    size = float(np.abs(C - C.mean(axis=0)).max())
    found = []
    for k in range(len(C)):
        apart = (C[k] - np.delete(C, k, axis=0)) / (size or 1.0)
        # A single centre has no others to be in the hull of.
        if not len(apart):
            found.append(math.inf)
            continue
        # Maximise s subject to s - <u, c_k - c_j> <= 0.
        rows = np.hstack([-apart, np.ones((len(apart), 1))])
        box = [(-1.0, 1.0)] * d + [(0.0, None)]
        solved = linprog(
            [0.0] * d + [-1.0], A_ub=rows, b_ub=np.zeros(len(apart)), bounds=box, method="highs"
        )
        assert solved.status == 0, solved.message
        found.append(-solved.fun * size)
    return torch.tensor(found, dtype=torch.float64)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _radii(z: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return radii [T, K], centres [T, K, d] and masses [K] of the final clusters."""
    T, _, d = z.shape
    masses = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add(0, labels, weights)
    centres = torch.zeros(T, len(masses), d, dtype=torch.float64).index_add(
        1, labels, weights[:, None] * z
    )
    centres = centres / masses[:, None]
    away = (z - centres[:, labels]).norm(dim=2)
    radii = torch.zeros(T, len(masses), dtype=torch.float64)
    return radii.scatter_reduce(1, labels.expand(T, -1), away, "amax"), centres, masses
