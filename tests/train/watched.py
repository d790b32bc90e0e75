"""A small model with everything a monitor could disturb, its batches, dense truth, wrong types."""

from contextlib import contextmanager

import jaxtyping
import torch
from torch import nn

from lipscope.nn.attention_layer import CosineSelfAttention, DotSelfAttention
from lipscope.nn.l2_attention import L2SelfAttention

DIM, HEADS, TOKENS = 8, 2, 6


class Small(nn.Module):
    """Attention of several kinds, dropout, batch statistics: everything a monitor could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.dot = DotSelfAttention(DIM, HEADS, causal=True)
        self.l2 = L2SelfAttention(DIM, HEADS)
        self.cosine = CosineSelfAttention(DIM, HEADS)
        self.drop = nn.Dropout(0.3)
        self.encoder = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(TOKENS)

    def forward(self, X, padding=None):
        X = X + self.drop(self.dot(X))
        X = self.norm(X + self.l2(X) + self.cosine(X))
        return self.encoder(X, src_key_padding_mask=padding)


def batches(count, size=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, TOKENS, DIM, generator=generator).to(dtype) for _ in range(count)]


def trained(called, optimizer, data, monitor=None):
    """The losses of a short training; the monitor's step comes after the optimiser's."""
    losses = []
    for X in data:
        loss = (called(X) - X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step()
    return losses


class Kept(nn.Module):
    """nn.MultiheadAttention whose weights torch keeps small, by either of its spectral norms."""

    def __init__(self, spectral_norm) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        spectral_norm(self.attention, "in_proj_weight")
        spectral_norm(self.attention.out_proj)

    def forward(self, X):
        return self.attention(X, X, X, need_weights=False)[0]


def dense_norm(f, X):
    """The norm of the dense Jacobian of f at X [n, d], in float64."""
    J = torch.autograd.functional.jacobian(f, X.double(), vectorize=False)
    return torch.linalg.matrix_norm(J.reshape(-1, X.numel()), 2).item()


@contextmanager
def unchecked():
    """As users run it: arguments of the wrong type reach the code, not the checker of the tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
