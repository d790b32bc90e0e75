"""sigma of one random attention head as the sequence grows, for two kinds of tokens.

Castin, Ablin and Peyré (2024) place one token at R u and all others elsewhere on that line, u an
eigenvector of A = K' Q / sqrt(k), so that every other token attends to the first alone: moving it
moves them all, and sigma is about sqrt(n - 1). Gaussian tokens in the same ball are a comparison.
"""

import math

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import lipscope as ls

LENGTHS = (2, 8, 32, 128, 512)
DENSE_UP_TO = 32
d = 9  # odd, so that A has a real eigenvalue


def head(generator: torch.Generator) -> tuple[ls.SelfAttention, Tensor]:
    """A head with Gaussian Q and K and a random rotation V, and its matrix A."""
    Q, K, G = torch.randn(3, d, d, dtype=torch.float64, generator=generator)
    V = torch.linalg.qr(G).Q
    return ls.SelfAttention(Q, K, V), K.T @ Q / math.sqrt(d)


def adversarial(A: Tensor, n: int, sharpness: float = 20.0) -> Tensor:
    """The configuration of castin2024 on the ball whose radius R gives 2 R^2 gamma = sharpness."""
    values, vectors = torch.linalg.eig(A)
    real = values.imag == 0
    values, vectors = values.real[real], vectors.real[:, real]
    least, most = values.min().item(), values.max().item()
    repelled = -least >= most / 8
    u = vectors[:, values.argmin() if repelled else values.argmax()]
    R = math.sqrt(sharpness / (2 * max(-least, most / 8)))
    crowd = -1.0 if repelled else 0.5
    return R * u * torch.tensor([1.0] + [crowd] * (n - 1), dtype=torch.float64)[:, None]


def gaussian(like: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian tokens, as many and in the same ball as those of `like`."""
    X = torch.randn(like.shape, dtype=torch.float64, generator=generator)
    return X * (like.norm(dim=1).max() / X.norm(dim=1).max())


def cells(f: ls.SelfAttention, X: Tensor, e: ls.Estimate) -> list[str]:
    """One row of the table: the certificate, the dense SVD where cheap, and the status."""
    n, dense = len(X), "-"
    if n <= DENSE_UP_TO:
        dense = f"{torch.linalg.matrix_norm(ls.jacobian(f, X).to_dense(), ord=2).item():.4f}"
    lower, upper = (
        math.floor(e.lower * 1e4) / 1e4,
        math.ceil(e.upper * 1e4) / 1e4,
    )  # printed bounds are bounds
    numbers = [f"{lower:.4f}", f"{e.value:.4f}", f"{upper:.4f}", dense, f"{math.sqrt(n - 1):.4f}"]
    return [str(n), *numbers, str(e.steps), e.status.name.lower()]


def table(title: str, f: ls.SelfAttention, inputs: list[Tensor]) -> Table:
    """sigma of f at each of the inputs."""
    solved = [ls.local_lipschitz(f, X, gap=0.01) for X in inputs]
    estimates = [e for e in solved if isinstance(e, ls.Estimate)]
    odds = max(1 - e.confidence for e in estimates)
    out = Table(title=title, caption=f"each upper bound fails with probability at most {odds:.0e}")
    for name in ("n", "lower", "sigma", "upper", "dense", "√(n-1)", "steps", "status"):
        out.add_column(name, justify="left" if name == "status" else "right")
    for X, e in zip(inputs, estimates, strict=True):
        out.add_row(*cells(f, X, e))
    return out


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    f, A = head(generator)
    worst = [adversarial(A, n) for n in LENGTHS]
    ordinary = [gaussian(X, generator) for X in worst]

    console = Console()
    console.print("sigma, the local Lipschitz constant of one random attention head\n")
    console.print(table("Adversarial tokens: sigma follows √(n-1)", f, worst))
    console.print(table("Gaussian tokens in the same ball", f, ordinary))


if __name__ == "__main__":
    main()
