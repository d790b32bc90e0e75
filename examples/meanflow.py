"""A small transformer trained with the MeanFlow loss, which needs forward mode through attention.

    python examples/meanflow.py                  # attend, then attention written out: equal curves
    python examples/meanflow.py --steps 300 --device cuda

MeanFlow (Geng et al., 2025) learns the average velocity u(z, r, t) of a flow between the times r
and t by the identity u = v - (t - r) du/dt, where du/dt is a derivative along (v, 0, 1): one jvp
per training step, through every attention layer, and a backward pass through the value. The data
are points on noisy circles, drawn by the script; each sequence is a circle, its tokens are points.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import lipscope as ls

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that torch can differentiate by itself, with an n x n matrix in memory."""
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.out(self.attention(q, k, v).transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Velocity(nn.Module):
    """u(z, r, t): the average velocity of each point of a sequence between the times r and t."""

    def __init__(self, width: int, heads: int, depth: int, attention: Attention) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(4, width), nn.Linear(width, 2)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(depth)))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        times = torch.stack([r, t], -1)[:, None].expand(-1, z.shape[1], -1)
        return self.read(self.blocks(self.embed(torch.cat([z, times], -1))))


def circles(batch: int, points: int, generator: torch.Generator) -> Tensor:
    """Points on circles of random radius, with a little noise: [batch, points, 2]."""
    angle = 2 * math.pi * torch.rand(batch, points, generator=generator)
    radius = 0.5 + torch.rand(batch, 1, generator=generator)
    noise = 0.02 * torch.randn(batch, points, 2, generator=generator)
    return radius[..., None] * torch.stack([angle.cos(), angle.sin()], -1) + noise


def loss(model: Velocity, x: Tensor, generator: torch.Generator) -> Tensor:
    """Squared distance of u to v - (t - r) du/dt, whose gradient is stopped as in the paper."""
    device = x.device
    noise = torch.randn(x.shape, generator=generator).to(device)
    r, t = torch.rand(2, len(x), generator=generator).sort(dim=0).values.to(device).unbind()
    weight = t[:, None, None]
    z, v = (1 - weight) * x + weight * noise, noise - x
    u, du = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))[:2]
    target = v - (t - r)[:, None, None] * du
    return (u - target.detach()).square().mean()


def train(attention: Attention, options: argparse.Namespace) -> list[float]:
    """The loss of every step; the same seeds for every attention."""
    torch.manual_seed(0)
    model = Velocity(64, 4, 2, attention).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    curve = []
    for _ in range(options.steps):
        x = circles(options.batch, options.points, generator).to(options.device)
        value = loss(model, x, generator)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        curve.append(value.item())
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small MeanFlow model with attend.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--points", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    curves = {}
    for name, attention in (("attend", ls.attend), ("written out", written_out)):
        start = time.perf_counter()
        curves[name] = train(attention, options)
        print(f"{name:12s} {options.steps} steps in {time.perf_counter() - start:.1f} s")
    print("step    attend    written out")
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(f"{step:4d}  {curves['attend'][step]:8.4f}  {curves['written out'][step]:8.4f}")
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    print(f"largest difference of the two curves: {apart:.1e}")


if __name__ == "__main__":
    main()
