"""Penalties for smoother attention: JaSMin on the weights P, and the measured constant itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lipscope._ambient import callers_device, entry_point, live_modules, plain_attention
from lipscope._checks import name_bad_argument
from lipscope._types import UserError
from lipscope.linalg.differentiate import check_input, check_map, jacobian
from lipscope.linalg.spectral import Solver, spectral_norm
from lipscope.nn.wrapped import attributes_kept


@name_bad_argument
def jasmin(P: Tensor, k: int = 0) -> Tensor:
    """Compute the penalty JaSMin_k on attention weights (Yudin et al. 2025).

    For k = 0 it is the maximum over rows p of log g_1(p), where g_1(p) >= ||diag p - p p'||, the
    norm of the Jacobian of the softmax. For k > 1 it is the maximum of log(g_1(p) / g_k(p)) with
    g_k(p) = p_k (1 - p_k + p_(k+1)) and p sorted; rows with fewer than k nonzero weights are
    ignored.

    Args:
        P: Attention weights [..., n, n], such as `layer.weights(X)`.
        k: 0, or an integer from 2 to the number of keys.

    Returns:
        The penalty, a scalar averaged over heads and sequences, differentiable in P.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> uniform = torch.full((4, 4), 0.25)
        >>> one_hot = torch.eye(4)
        >>> bool(ls.nn.jasmin(one_hot) < ls.nn.jasmin(uniform))
        True
    """
    tensor = isinstance(P, Tensor)
    if not tensor or P.ndim < 2 or P.numel() == 0 or not P.dtype.is_floating_point:
        got = f"{P.dtype} {tuple(P.shape)}" if tensor else type(P).__name__
        raise UserError(
            f"jasmin takes attention weights [..., n, n], such as layer.weights(X), got {got}"
        )
    if isinstance(k, bool) or not isinstance(k, int) or (k != 0 and not 2 <= k <= P.shape[-1]):
        raise UserError(
            f"k must be 0, or an integer from 2 to the number of keys {P.shape[-1]}, got {k!r}"
        )
    from lipscope.theorems.yudin2025 import softmax_jacobian_norm  # loads SciPy

    P = P if P.dtype == torch.float64 else P.float()
    tiny = torch.finfo(P.dtype).tiny
    # The zero term keeps the graph: for a single key the gradient is 0, not None.
    row = softmax_jacobian_norm(P).clamp_min(tiny).log() + 0 * P[..., 0]
    if k == 0:
        return row.amax(dim=-1).mean()
    p = nn.functional.pad(P.topk(min(k + 1, P.shape[-1]), dim=-1).values, (0, 1))
    g = p[..., k - 1] * (1 - p[..., k - 1] + p[..., k])
    # g_1 >= g_k, so the 0 of an ignored row never exceeds the value of another.
    row = torch.where(g > tiny, row - g.clamp_min(tiny).log(), 0.0)
    return row.amax(dim=-1).mean()


@entry_point
def measured_sigma(f: Callable[[Tensor], Tensor], X: Tensor, tol: float = 1e-3) -> Tensor:
    """Measure the local Lipschitz constant ||D_X f||, differentiable in the weights of f and in X.

    The solver finds the singular vectors u, v, which are then held fixed: where the largest
    singular value is simple, its derivative is that of u' J v. A module in bfloat16 or float16 is
    measured in float32. Modules are measured in their current mode; their buffers do not change.

    Args:
        f: A map of tokens, for instance a module.
        X: Tokens [n, d], or a batch [B, n, d] whose members f maps independently.
        tol: Relative residual at which the solver stops.

    Returns:
        sigma, a scalar, or [B] for a batch.

    Raises:
        UserError: If f is not finite at X, or X is 16-bit and f is not a module.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> scale = torch.tensor(2.0, requires_grad=True)
        >>> sigma = ls.nn.measured_sigma(lambda X: scale * X, torch.ones(3, 4))
        >>> sigma.backward()
        >>> round(sigma.item(), 4), round(scale.grad.item(), 4)
        (2.0, 1.0)
    """
    check_input(X)
    check_map(f)
    kept = attributes_kept(f) if isinstance(f, nn.Module) else nullcontext()
    with (
        torch.enable_grad(),
        plain_attention(),
        callers_device(),
        kept,
    ):
        f, X = _lent(f, X)
        top = spectral_norm(jacobian(f, X.detach()), tol, solver=Solver(seed=0))
        x = X if X.requires_grad else X.detach().requires_grad_(True)
        y = f(x)
        if not bool(y.isfinite().all()):
            raise UserError("f is not finite at X; look for NaN in its weights")
        pulled = torch.zeros_like(x)
        if y.requires_grad:
            u = top.left.to(y).reshape(y.shape)
            (pulled,) = torch.autograd.grad(y, x, u, create_graph=True, materialize_grads=True)
        if not pulled.requires_grad:  # a constant derivative has the gradient 0, not None
            pulled = pulled + 0 * x
    # Multiplied out here, where the caller decides whether there is a graph.
    return (pulled * top.right.to(x)).sum(dim=(-2, -1))


def _lent(f: Callable[[Tensor], Tensor], X: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """f on copies of its buffers, in float32 at least; gradients reach its own weights."""
    half = X.dtype not in (torch.float32, torch.float64)
    if not isinstance(f, nn.Module):
        if half:
            raise UserError(
                f"X is {X.dtype}, and only a torch.nn.Module can be measured in float32 instead; "
                "convert f and X to float32"
            )
        return f, X
    module = f
    buffers = dict(f.named_buffers())
    if not half and not buffers:
        return f, X

    def lent(x: Tensor) -> Tensor:
        # New copies in every call: a power iteration stored in a buffer would otherwise continue
        # from call to call, and f would not be a function.
        state = {
            **dict(module.named_parameters()),
            **{name: b.clone() for name, b in buffers.items()},
        }
        if half:
            state = {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
        with live_modules:  # the copies replace the module's own tensors for this call
            return torch.func.functional_call(module, state, (x,))

    return lent, X.float() if half else X
