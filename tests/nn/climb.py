"""Ascent on the norm of the derivative of a layer, to attack its bound."""

import torch
from torch import Tensor

import lipscope as ls
from lipscope.attack.ascent import sigma_gradient
from lipscope.linalg.local import infinity_norm


def top_pair(f: ls.SelfAttention, X: Tensor, norm: str) -> tuple[float, Tensor, Tensor]:
    """The norm of the derivative at X and the u, v with u' J v equal to it."""
    J = ls.jacobian(f, X)
    if J.in_size > 200:
        top = infinity_norm(J) if norm == "inf" else ls.spectral_norm(J, 1e-4)
        return top.value, top.left, top.right
    dense = J.to_dense()
    if norm == "inf":
        row = dense.abs().sum(dim=1).argmax()
        return (
            dense[row].abs().sum().item(),
            torch.eye(len(dense)).double()[row],
            dense[row].sign().view_as(X),
        )
    U, S, V = torch.linalg.svd(dense)
    return S[0].item(), U[:, 0], V[0].view_as(X)


def climbed(f: ls.SelfAttention, X: Tensor, norm: str, steps: int) -> float:
    """The largest norm of the derivative on an ascent from X along u' J v, with growing strides."""
    best, stride = 0.0, 0.1 * X.norm().item()
    for _ in range(steps):
        value, left, right = top_pair(f, X, norm)
        if value > best:
            best, here, uphill = value, X, sigma_gradient(f, X, left, right)
            stride *= 1.5
        else:
            stride /= 2
        X = here + stride * uphill / uphill.norm().clamp_min(1e-300)
    return best
