"""How much of its constant a contractive layer uses: typical inputs, and the worst that are found.

python -m benchmarks.promised                 # the tables of docs/lipschitz_layers.md, minutes
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

import lipscope as ls
from lipscope.nn.l2_attention import BALL, radius
from lipscope.theorems.kim2021 import phi_inverse

DIM, HEADS, TOKENS, CONSTANT = 32, 4, 128, 0.9
BALLS = (None, BALL, 0.25)
STEPS = 150


def contractive(norm: str, ball: float | None, causal: bool) -> ls.nn.ContractiveL2Attention:
    torch.manual_seed(0)
    layer = ls.nn.ContractiveL2Attention(DIM, HEADS, CONSTANT, norm, causal, ball)
    return layer.double().requires_grad_(False)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, DIM, dtype=torch.float64, generator=generator)


def reaction(layer: ls.nn.ContractiveL2Attention, X: Tensor) -> float:
    """The local constant in norm 2; in norm inf that of the last token, which sees all others."""
    f = layer if layer.ball is not None else layer.as_map(TOKENS)
    if layer.norm == "2":
        return ls.local_lipschitz(f, X, 1e-4).value
    J, U = ls.jacobian(f, X), torch.zeros(DIM, TOKENS, DIM, dtype=torch.float64)
    U[torch.arange(DIM), -1, torch.arange(DIM)] = 1
    return max(J.rmv(u).abs().sum().item() for u in U)


class LastToken:
    """The output of the last token as a function of an input for each of its coordinates."""

    def __init__(self, layer: ls.nn.ContractiveL2Attention) -> None:
        self.Q = layer.query.weight.unflatten(0, (HEADS, -1))
        self.k = layer.head_size
        self.rho = math.inf if layer.ball is None else radius(layer.ball.size, self.k)
        O = layer.out.weight.unflatten(1, (HEADS, -1))
        self.w = torch.einsum("rha,hab->rhb", O, layer.value_map(TOKENS))

    def __call__(self, X: Tensor) -> Tensor:
        """Coordinate r at X[r], from X [DIM, TOKENS, DIM]."""
        y = torch.einsum("rnd,hkd->rhnk", X, self.Q)
        if self.rho < math.inf:
            y = y * (self.rho / y.norm(dim=-1, keepdim=True).clamp_min(self.rho))
        P = (-(y - y[:, :, -1:]).square().sum(dim=-1) / math.sqrt(self.k)).softmax(dim=-1)
        return torch.einsum("rhn,rhnk,rhk->r", P, y, self.w)

    def row_sums(self, X: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(self(X).sum(), X, create_graph=True)
        return slope.abs().sum(dim=(1, 2))

    def starts(self) -> list[Tensor]:
        """Random tokens, queries on a sphere, and a query among two ends in all heads at once."""
        g = torch.Generator().manual_seed(1)
        shape = (DIM, TOKENS, HEADS, self.k)
        far = math.sqrt((1 + phi_inverse(TOKENS)) * math.sqrt(self.k))
        size = min(self.rho, far)
        sphere = torch.randn(shape, generator=g, dtype=torch.float64)
        sphere *= size / sphere.norm(dim=-1, keepdim=True)
        back = torch.linalg.inv(self.Q.flatten(0, 1)).T
        found = [sphere]
        signs = (1.0 - 2.0 * (torch.arange(TOKENS) % 2))[:, None, None]
        for along in (self.w, torch.linalg.svd(self.Q).U[..., 0].expand_as(self.w)):
            ends = size * signs * (along / along.norm(dim=-1, keepdim=True))[:, None]
            for share in (0.02, 0.6):
                line = ends + 0.02 * sphere
                line[:, -1] = share * sphere[:, -1]
                found.append(line)
        plain = torch.randn(DIM, TOKENS, DIM, generator=g, dtype=torch.float64)
        return [plain, *(y.flatten(2) @ back for y in found)]

    def largest(self) -> float:
        """The largest row sum on ascents from every start, in all coordinates at once."""
        best = 0.0
        for start in self.starts():
            X = start.clone().requires_grad_(True)
            rate = 0.03 * start.abs().mean().item()
            climb = torch.optim.Adam([X], lr=rate)
            for step in range(STEPS):
                climb.param_groups[0]["lr"] = rate * (1 - step / STEPS)
                found = self.row_sums(X)
                best = max(best, found.max().item())
                climb.zero_grad()
                (-found.sum()).backward()
                climb.step()
        return best


def worst(layer: ls.nn.ContractiveL2Attention) -> float:
    """The largest constant that ascent over inputs finds."""
    if layer.norm == "inf":
        # A causal mask changes nothing for the last token.
        return LastToken(layer).largest()
    f = layer if layer.ball is not None else layer.as_map(TOKENS)
    # A token near 0 among two clusters, the worst input on a line, in every size.
    u = torch.linalg.svd(layer.value.weight).Vh[0]
    line = (1.0 - 2.0 * (torch.arange(TOKENS) % 2))[:, None] * u
    line[-1] = 0
    family = [2.0**j * (line + 1e-3 * tokens()) for j in range(-3, 7)]
    steepest = max(family, key=lambda X: ls.local_lipschitz(f, X, 1e-2).value)
    climb, domain = ls.attack.Climb(steps=25, restarts=1), ls.Ball(100.0, TOKENS)
    return ls.attack.ascend(f, domain, climb, dim=DIM, starts=[steepest, tokens()]).value


def main() -> None:
    torch.set_num_threads(1)
    print(f"n = {TOKENS}, dim = {DIM}, {HEADS} heads, float64, as initialised, over the promised")
    print("constant: at unit variance, the largest of 12 sizes from 1/32 to 64, after ascent\n")
    print("| norm | ball | mask | unit variance | largest | after ascent |")
    print("|---|---|---|---|---|---|")
    for norm, ball, causal in product(("2", "inf"), BALLS, (False, True)):
        layer = contractive(norm, ball, causal)
        found = [reaction(layer, 2.0**j * tokens()) / CONSTANT for j in range(-5, 7)]
        high = max(*found, worst(layer) / CONSTANT)
        assert high <= 1
        mask = "causal" if causal else "none"
        print(
            f"| {norm} | {ball or 'none'} | {mask} | {found[5]:.3f} | {max(found):.3f} "
            f"| {high:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
