"""Claim A1: a residual flow of contractive attention as a density, on pairs of tokens.

Two tokens of one coordinate have a density on the plane, so that everything can be checked: the
flow is trained on a known density, its log-determinants are 2 by 2, and its mass is an integral
over a grid. With dot-product attention x + g(x) need not be one-to-one, and the same formula counts
some outputs more than once: its mass is above 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lipscope.nn.attention_layer import DotSelfAttention
from lipscope.nn.contractive import ContractiveL2Attention, ContractiveMLP
from lipscope.nn.invertible import InvertibleResidual
from lipscope.papers.claims import Claim, Numbers, Quoted, Verdict, judged
from lipscope.papers.page import Picture, columns
from lipscope.papers.setting import Setting

CONSTANT = 0.9
HIDDEN = 16
BLOCKS = 4
MEAN = 0.5
GAP = 1.0
SPREAD = 0.25
"""A pair is m + h, m - h: m of standard deviation MEAN, h around +-GAP with SPREAD."""

WEIGHTS = (1.0, 2.0, 3.0)
"""Weights of queries and keys of the single layers whose mass is compared."""

KINDS = ("dot product", "contractive L2")

REACH = 10.0
"""The grids of the integrals cover [-REACH, REACH] in both tokens."""


class PairFlow(nn.Module):
    """Residuals of attention and of a feed-forward layer in turn, with a scale before each."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        parts = []
        for _ in range(BLOCKS):
            if attention:
                parts.append(InvertibleResidual(ContractiveL2Attention(1, 1, CONSTANT)))
            parts.append(InvertibleResidual(ContractiveMLP(1, HIDDEN, CONSTANT)))
        self.parts = nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.zeros(len(parts) + 1))

    def log_density(self, x: Tensor) -> Tensor:
        """log N(z) + log |det D z| for pairs x [B, 2, 1] and z the output of the flow."""
        total = torch.zeros(len(x), dtype=x.dtype)
        # Through tokens that need a gradient: the Jacobian is taken by autograd, row by row.
        x = x.detach().requires_grad_(True)
        for scale, part in zip(self.scale, self.parts, strict=False):
            x = x * scale.exp()
            y = part(x)
            total = total + 2 * scale + determinant(x, y).log()
            x = y
        z = x * self.scale[-1].exp()
        total = total + 2 * self.scale[-1]
        return total - z.square().sum(dim=(1, 2)) / 2 - math.log(2 * math.pi)


def determinant(x: Tensor, y: Tensor) -> Tensor:
    """|det dy/dx| for pairs [B, 2, 1], differentiable."""
    (a, b), (c, d) = (
        torch.autograd.grad(y[:, i, 0].sum(), x, create_graph=True)[0][..., 0].T for i in range(2)
    )
    return (a * d - b * c).abs()


def draw_pairs(count: int, g: torch.Generator) -> Tensor:
    """Pairs of tokens [count, 2, 1] from the density that is to be learned."""
    side = torch.rand(count, generator=g).sub(0.5).sign()
    noise = torch.randn(2, count, generator=g)
    h = GAP * side + SPREAD * noise[0]
    m = MEAN * noise[1]
    return torch.stack([m + h, m - h], dim=1)[..., None].double()


def true_log_density(x: Tensor) -> Tensor:
    """The log-density of `draw_pairs`; (x_1, x_2) -> (m, h) has determinant 1/2."""
    m = (x[:, 0, 0] + x[:, 1, 0]) / 2
    h = (x[:, 0, 0] - x[:, 1, 0]) / 2

    def normal(z: Tensor, deviation: float) -> Tensor:
        return -((z / deviation).square()) / 2 - math.log(deviation * math.sqrt(2 * math.pi))

    two = torch.logaddexp(normal(h - GAP, SPREAD), normal(h + GAP, SPREAD)) - math.log(2)
    return normal(m, MEAN) + two - math.log(2)


def gaussian_log_density(learned: Tensor, x: Tensor) -> Tensor:
    """The log-density of the Gaussian with the mean and covariance of `learned`."""
    flat = learned.flatten(1)
    fitted = torch.distributions.MultivariateNormal(flat.mean(dim=0), flat.T.cov())
    found: Tensor = fitted.log_prob(x.flatten(1))
    return found


def integral(density: Callable[[Tensor], Tensor], cells: int) -> float:
    """The integral of a function of pairs over the grid, by the midpoint rule."""
    side = torch.linspace(-REACH, REACH, cells, dtype=torch.float64)
    points = torch.cartesian_prod(side, side)[..., None]
    total = sum(float(density(part).detach().sum()) for part in points.split(16384))
    return total * float(side[1] - side[0]) ** 2


def layer_mass(g: nn.Module, weight: float) -> float:
    """The mass of N(x + g(x)) |det D(x + g(x))| for a layer with W_Q = W_K = weight, V < 0."""
    sizes = {"query": weight, "key": weight, "value": -0.5, "out": 1.0}
    for name, parameter in g.named_parameters():
        nn.init.constant_(parameter, sizes[name.split(".")[0]])

    def density(x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        z = x + g(x)
        return determinant(x, z) * (-z.square().sum(dim=(1, 2)) / 2).exp() / (2 * math.pi)

    return integral(density, 401)


def trained_flow(attention: bool, learned: Tensor, steps: int, seed: int) -> PairFlow:
    """A flow fitted by maximum likelihood."""
    g = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        flow = PairFlow(attention).double()
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for _ in range(steps):
        batch = learned[torch.randint(len(learned), (256,), generator=g)]
        loss = -flow.log_density(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return flow


def run_flow(setting: Setting) -> Numbers:
    """Log-likelihood of held-out pairs, mass, and the log-determinant and inverse of the flow."""
    g = torch.Generator().manual_seed(setting.seed)
    learned = draw_pairs(4000, g)
    test = draw_pairs(2000, g)
    steps = 150 if setting.quick else 1500
    found = {
        "true density": true_log_density(test),
        "Gaussian": gaussian_log_density(learned, test),
    }
    for done, (name, attention) in enumerate((("no attention", False), ("contractive L2", True))):
        setting.progress(done, 3)
        flow = trained_flow(attention, learned, steps, setting.seed)
        found[name] = flow.log_density(test).detach()
    # Differences on the same pairs: what they have in common does not add to the error.
    gains = {name: values - found["Gaussian"] for name, values in found.items()}
    setting.progress(2, 3)
    return {
        "rows": {
            name: {"gain": x.mean().item(), "error": x.std().item() / math.sqrt(len(x))}
            for name, x in gains.items()
        },
        "mass": integral(lambda x: flow.log_density(x).exp(), 201),
        "layers": [
            {
                "weight": weight,
                "dot product": layer_mass(DotSelfAttention(1, 1).double(), weight),
                "contractive L2": layer_mass(ContractiveL2Attention(1, 1, 0.5).double(), weight),
            }
            for weight in WEIGHTS
        ],
        **_checks(flow, test[:64]),
    }


def _checks(flow: PairFlow, x: Tensor) -> dict[str, float]:
    """Of the first layer: the estimate of log det against the dense one; error of the inverse."""
    residual = flow.parts[0]
    assert isinstance(residual, InvertibleResidual)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = residual.log_det(x, terms=20, probes=64)
    J = torch.func.vmap(torch.func.jacrev(residual))(x).reshape(len(x), 2, 2)
    off = (found.value.detach() - torch.linalg.slogdet(J).logabsdet).abs()
    allowed = 5 * found.standard_error + found.remainder
    back = residual.inverse(residual(x).detach())
    return {
        "log det off": (off / allowed.clamp_min(1e-12)).max().item(),
        "inverse error": float((back.value - x).norm() / x.norm()),
    }


def judge_flow(numbers: Numbers, quoted: Quoted) -> Verdict:
    rows = numbers["rows"]
    layers = numbers["layers"]
    flow, plain, truth = (rows[n] for n in ("contractive L2", "no attention", "true density"))
    low, high = (flow["gain"] + sign * 2 * flow["error"] for sign in (-1, 1))
    whole = max(abs(m - 1) for m in (numbers["mass"], *(r["contractive L2"] for r in layers)))
    holds = (
        max(0.0, plain["gain"]) < low < truth["gain"]
        and whole < 1e-3
        and min(row["dot product"] for row in layers) > 1.05
        and numbers["inverse error"] < 1e-8
        and numbers["log det off"] <= 1
    )
    reason = (
        f"a flow of contractive L2 attention gains {flow['gain']:.3f} nats per pair on a Gaussian "
        f"(without attention {plain['gain']:.3f}, the true density {truth['gain']:.3f}); its mass "
        f"is 1 within {whole:.1e}, its inverse and log-determinant agree with dense ones. With dot "
        f"product what is called a density has mass "
        f"{_listed(r['dot product'] for r in layers)} at weights "
        f"{_listed(r['weight'] for r in layers)}"
    )
    return judged(holds, reason, (low, high))


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def plot_flow(numbers: Numbers) -> Picture:
    return Picture(
        title="Mass of what a residual of one attention layer calls a density",
        x="weights of queries and keys",
        y="mass",
        log="",
        lines=columns(numbers["layers"], "weight", {name: name for name in KINDS}),
        columns=["density", "log-likelihood above a Gaussian, nats per pair", "standard error"],
        rows=[
            [name, f"{row['gain']:.3f}", f"{row['error']:.3f}"]
            for name, row in numbers["rows"].items()
        ],
    )


CLAIMS = [
    Claim("A1", run_flow, judge_flow, plot_flow),
]
