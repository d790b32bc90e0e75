"""The Jacobian of a map at an input, as a linear operator: closed form where the map has one,
autograd otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from lipscope._ambient import (
    callers_device,
    cause_of,
    entry_point,
    ordinary_module,
    plain_attention,
)
from lipscope._files import on_one_line
from lipscope._torch_internals import is_dropout
from lipscope._types import UserError
from lipscope.linalg.operator import LOCAL, LinearOperator, Pair, Product, Rounding, Space, steady
from lipscope.linalg.rounding_noise import RoundingNoise, UnseenRoundingError

Map = Callable[[Tensor], Tensor]

MIXED = 1e-9
"""Share of its own change that a member of a batch may leave in others: nothing but rounding."""

ROOTS = {"sqrt", "rsqrt", "pow", "norm", "linalgvectornorm", "euclideandist", "cdist", "pdist"}
"""Operations whose slope is infinite at zero, by their names in a graph."""

SMOOTH = (
    "use squared distances in their place, ||q||^2 + ||k||^2 - 2 <q, k>, or add a small number "
    "under the root"
)


@entry_point
def jacobian(f: Map, X: Tensor) -> LinearOperator:
    """The derivative of a map at an input, as a linear operator.

    ``f.jacobian(X)`` is used where f has it, as :class:`SelfAttention` does. Any other f is
    differentiated by autograd: it is run once, and each product costs one backward pass through
    the graph that is kept.

    Args:
        f: A map of tensors: a SelfAttention, a module in evaluation mode, or a function.
        X: Tokens [n, d], or a batch [B, n, d] for a map that treats its members separately.

    Returns:
        D_X f, with products ``mv`` and ``rmv``; a batch of Jacobians for a batch X.

    Raises:
        UserError: If X is not finite, f is random, its backward pass cannot be differentiated, or
            f mixes the members of a batch.

    Example:
        >>> import torch, lipscope as ls
        >>> J = ls.jacobian(lambda X: X @ X.T, torch.eye(2, dtype=torch.float64))
        >>> J.to_dense().shape
        torch.Size([4, 4])
    """
    check_input(X)
    check_map(f)
    if hasattr(f, "jacobian"):
        return f.jacobian(X)
    f = ordinary_module(f) if isinstance(f, nn.Module) else f
    return steady(jacobian_on(f, X))


def check_input(X: Tensor) -> None:
    """Refuse what no derivative can be taken at, naming the first bad entry."""
    if not isinstance(X, Tensor):
        raise UserError(
            f"X must be a torch.Tensor of shape [n, d] or [B, n, d], got {type(X).__name__}"
        )
    if X.ndim not in (2, 3):
        raise UserError(
            f"X must have shape [n, d] or [B, n, d], got {tuple(X.shape)}; for another shape, such "
            "as an image x, measure lambda X: f(X.reshape(x.shape)) at x.reshape(1, -1)"
        )
    if X.numel() == 0:
        raise UserError(f"X is empty, shape {tuple(X.shape)}: a sequence needs at least one token")
    check_tensor("X", X)


def check_tensor(name: str, x: Tensor) -> None:
    """Floating point and finite, with entries that can be read."""
    if x.device.type == "meta" or x.layout != torch.strided:
        raise UserError(
            f"{name} must be a dense tensor with data, got one of layout {x.layout} on {x.device}"
        )
    if not x.dtype.is_floating_point:
        raise UserError(
            f"{name} must be a floating-point tensor, got {x.dtype}; "
            "convert it with .float() or .double()"
        )
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise UserError(
            f"{name} has dtype {x.dtype}, which is too coarse to differentiate; "
            "convert it to float32 or float64"
        )
    bad = ~x.isfinite()
    if bad.any():
        index = tuple(torch.nonzero(bad)[0].tolist())
        raise UserError(
            f"{name} holds {x[index].item()} at index {list(index)} (shape {tuple(x.shape)}); "
            "it must be finite"
        )


def check_one_device(name: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise unless the others are where x is."""
    for other, y in others.items():
        if y is not None and y.device != x.device:
            raise UserError(
                f"{name} and {other} must be on one device, got {x.device} and {y.device}; "
                "move one of them"
            )


def check_map(f: Map) -> None:
    """Refuse a module whose forward pass is random."""
    if not callable(f):
        raise UserError(f"f must be a map from tensors to tensors, got {type(f).__name__}")
    if isinstance(f, torch.nn.Module):
        for name, module in f.named_modules():
            rate = getattr(module, "p", None) if is_dropout(module) else None
            rate = getattr(module, "dropout", None) if rate is None else rate
            if module.training and isinstance(rate, float) and rate > 0:
                raise UserError(
                    f"module {name or type(f).__name__!r} applies dropout at rate {rate} in "
                    "training mode; call .eval() first"
                )


def device_of(f: Map, *others: Tensor) -> torch.device:
    """The device of a module's weights, else that of the first other tensor, else the CPU."""
    own = (*f.parameters(), *f.buffers()) if isinstance(f, nn.Module) else ()
    return next((x.device for x in (*own, *others)), torch.device("cpu"))


def jacobian_on(f: Map, X: Tensor, space: Space = LOCAL) -> LinearOperator:
    """The derivative of a map by autograd; with several ranks, X is this one's tokens.

    f must then gather what it needs of other tokens by functions that autograd knows.
    """
    x, y, mv, rmv = _products(f, X)
    if any(node.name().startswith(("Cdist", "EuclideanDist")) for node in _nodes(y)):
        f = with_distances(f)
        x, y, mv, rmv = _products(f, X)
    _check_adjoint(mv, rmv, x, y, space)
    if X.ndim == 3 and len(X) > 1 and space is LOCAL:
        _check_members_apart(f, mv, rmv, x, y)

    def perturbed(i: int) -> Pair:
        mode = RoundingNoise(i)
        with _unless_it_fails():
            _, moved, mv, rmv = _products(f, X, mode)
            if moved.shape != y.shape:
                raise UnseenRoundingError("its output changes its shape when its numbers move")
            if i == 0:
                with torch.enable_grad(), plain_attention(), callers_device():
                    mode.check_nothing_left_torch(f, X)
        return _unless_it_fails()(mv), _unless_it_fails()(rmv)

    batch = X.shape[0] if X.ndim == 3 else None
    inner = 0 if batch is None else 1
    constant = not y.requires_grad
    return LinearOperator(
        mv=mv,
        rmv=rmv,
        in_shape=tuple(X.shape[inner:]),
        out_shape=tuple(y.shape[inner:]),
        batch=batch,
        dtype=X.dtype,
        device=X.device,
        rounding=Rounding(size=0.0) if constant else Rounding(perturbed=perturbed),
        space=space,
    )


@contextmanager
def _unless_it_fails() -> Iterator[None]:
    """Nothing is known of a map that fails when its numbers move.

    It may compute sizes in floating point, or refuse inputs, which must not move at all.
    """
    try:
        yield
    except (UnseenRoundingError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever f raises
        why = f"it fails when its numbers move: {on_one_line(error)}"
        raise UnseenRoundingError(why) from error


def _products(
    f: Map, X: Tensor, rounding: RoundingNoise | None = None
) -> tuple[Tensor, Tensor, Product, Product]:
    """X and f(X) with their graph, and the products with J and J'; `rounding` acts on all of them.

    J' u is a backward pass; J v is a backward pass through that backward pass, which is linear in
    u."""
    moved = rounding or nullcontext()
    x = X.detach().clone().requires_grad_(True)
    with torch.enable_grad(), plain_attention(), moved, callers_device():
        # A map that keeps state in place is differentiated at its last evaluation. It gets copies,
        # which it may change in place; in the mode they move.
        again = _called(f, x.clone()) if rounding is None else None
        y = f(x.clone())
        if rounding is None:
            _check_output(y, again, X)
        u = torch.zeros_like(y, requires_grad=True)
        pulled = None
        if y.requires_grad:
            pulled = _gradient(y, x, u, create_graph=True)

    def mv(E: Tensor) -> Tensor:
        if pulled is None or not pulled.requires_grad:
            return torch.zeros_like(y)
        with moved:
            if rounding is not None:
                rounding.expect(E)
            return _gradient(pulled, u, E)

    def rmv(U: Tensor) -> Tensor:
        if not y.requires_grad:
            return torch.zeros_like(x)
        with moved:
            if rounding is not None:
                rounding.expect(U)
            return _gradient(y, x, U)

    return x, y, mv, rmv


def _gradient(y: Tensor, x: Tensor, u: Tensor, create_graph: bool = False) -> Tensor:
    """The derivative of <u, y> in x, from a graph that is kept."""
    try:
        (found,) = torch.autograd.grad(
            y, x, u, retain_graph=True, create_graph=create_graph, materialize_grads=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Backward passes that torch.compile makes have no derivatives.
        remedy = "; measure it without torch.compile" if "compile" in str(error) else ""
        raise UserError(
            cause_of("a product with the Jacobian", str(error))
            or "f cannot be differentiated twice by autograd, which a product with its Jacobian "
            f"takes: {on_one_line(error)}{remedy}"
        ) from error
    return found


def _check_adjoint(mv: Product, rmv: Product, x: Tensor, y: Tensor, space: Space) -> None:
    """<u, J v> = <J' u, v>, unless f's own backward pass cannot be differentiated."""
    g = torch.Generator().manual_seed(0)
    v, u = (torch.randn(z.shape, generator=g, dtype=torch.float32).to(z) for z in (x, y))
    Jv = mv(v)
    Ju = rmv(u)
    left, right = space.sum(torch.stack([(u * Jv).sum(), (Ju * v).sum()]).double())
    lengths = torch.stack([z.double().norm() for z in (u, Jv, Ju, v)])
    long_u, long_Jv, long_Ju, long_v = space.norm(lengths)
    size = long_u * long_Jv + long_Ju * long_v
    # A derivative that vanishes up to rounding has nothing to compare.
    eps = torch.finfo(x.dtype).eps
    gain = space.largest(y.abs().max())
    noise = 1e4 * eps * long_u * long_v * gain / space.largest(x.abs().max())
    if (left - right).abs() > 0.02 * size + noise.nan_to_num(nan=torch.inf):
        raise UserError(
            "f has a backward pass that autograd cannot differentiate (a custom "
            "autograd.Function that detaches?), so products with its Jacobian are not available"
        )


def _check_members_apart(f: Map, mv: Product, rmv: Product, x: Tensor, y: Tensor) -> None:
    """Refuse a map in which a member of the batch acts on another one.

    Tangents in the members whose index has a given bit must leave the others alone, and so must
    cotangents: any two members differ in some bit. Vectors are scaled so that every member changes
    by about one, or a loud one would hide what the others exchange.
    """
    remedy = "; call .eval() on it (BatchNorm?)" if isinstance(f, nn.Module) else ""
    modules = f.modules() if isinstance(f, nn.Module) else ()
    if any(getattr(module, "batch_first", True) is False for module in modules):
        remedy = "; build the module with batch_first=True"
    members = len(x)
    g = torch.Generator().manual_seed(0)
    index = torch.arange(members)

    def size(change: Tensor) -> Tensor:
        return change.detach().double().abs().flatten(1).amax(dim=1).nan_to_num().cpu()

    for product, start in ((mv, x), (rmv, y)):
        v = torch.randn(start.shape, generator=g, dtype=torch.float64)
        per_member = (members, *[1] * (start.ndim - 1))
        whole = size(product(v.to(start)))
        v = v / torch.where(whole > 0, whole, 1.0).reshape(per_member)
        for bit in range((members - 1).bit_length()):
            some = (index >> bit) % 2 == 1
            change = size(product((v * some.reshape(per_member)).to(start)))
            if change[~some].max() > MIXED * change[some].max():
                raise UserError(
                    f"f mixes the members of the batch X of shape {tuple(x.shape)}: a change of "
                    "some of them changes the output of others, so no member has a constant of "
                    f"its own{remedy}, or pass one sequence [n, d] at a time"
                )


def _called(f: Map, x: Tensor) -> object:
    """f(x), with a remedy where f needs more inputs, or takes batches only."""
    try:
        return f(x)
    except TypeError as error:
        if "required positional argument" not in str(error):
            raise
        raise UserError(
            f"f needs more than one input ({error}); give the others in a function of X, such as "
            "lambda X: f(X, context)"
        ) from error
    except (LookupError, RuntimeError, ValueError, AssertionError) as error:
        if isinstance(error, UserError) or x.ndim != 2:
            raise
        try:
            takes_batches = isinstance(f(x[None]), Tensor)
        except Exception:  # whatever f raises
            takes_batches = False
        if not takes_batches:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UserError(
            f"f fails on X of shape {tuple(x.shape)} ({reason}), but takes batches: pass X[None] "
            "of shape [1, n, d]"
        ) from error


def _check_output(y: object, again: object, X: Tensor) -> None:
    """y and `again` are two evaluations at X."""
    if not isinstance(y, Tensor) or not isinstance(again, Tensor) or not y.dtype.is_floating_point:
        got = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise UserError(
            f"f must return a floating-point tensor, got {got}; wrap it to return the tensor alone"
        )
    if y.numel() == 0:
        raise UserError(f"f returns an empty tensor of shape {tuple(y.shape)}")
    if X.ndim == 3 and (y.ndim < 2 or y.shape[0] != X.shape[0]):
        raise UserError(
            f"f maps a batch of shape {tuple(X.shape)} to {tuple(y.shape)}: "
            f"the leading dimension must stay {X.shape[0]}, and something must follow it"
        )
    size = y.detach().nan_to_num().abs().max()
    if (y - again).detach().nan_to_num().abs().max() > 1e-3 * size:
        raise UserError(
            "f is random: two evaluations at the same X differ; call .eval() on its modules, "
            "or fix its seed"
        )


class _Distance(torch.autograd.Function):
    """torch.cdist for p = 2, with derivatives of every order; 0 at distance 0, as PyTorch has it.

    PyTorch's own is not differentiable twice for few points, and NaN at distance 0 for many.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, mode: str) -> Tensor:
        distance = torch.cdist(x, z, compute_mode=mode)
        ctx.save_for_backward(x, z, distance)
        return distance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        x, z, distance = ctx.saved_tensors
        apart = distance > 0
        w = torch.where(apart, g / torch.where(apart, distance, 1), 0)
        left = x * w.sum(dim=-1, keepdim=True) - w @ z
        right = z * w.sum(dim=-2).unsqueeze(-1) - w.mT @ x
        return left.sum_to_size(x.shape), right.sum_to_size(z.shape), None


class TwiceDifferentiable(TorchFunctionMode):
    """Replaces torch.cdist for p = 2 by a function that can be differentiated twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.cdist:
            return func(*args, **(kwargs or {}))

        def distance(
            x1: Tensor,
            x2: Tensor,
            p: float = 2.0,
            compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
        ) -> Tensor:
            if p != 2:
                return torch.cdist(x1, x2, p, compute_mode)
            return _Distance.apply(x1, x2, compute_mode)

        return distance(*args, **(kwargs or {}))


def with_distances(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same map, with a torch.cdist that can be differentiated twice."""

    def same(X: Tensor) -> Tensor:
        with TwiceDifferentiable():
            return f(X)

    return same


def not_finite_in(f: Callable[[Tensor], Tensor], X: Tensor) -> str:
    """Name the operation whose derivative is the first that is not finite, and a remedy.

    Empty if there is none in a backward pass.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = X.detach().clone().requires_grad_(True)
        y = f(x.clone())
        if not y.isfinite().all():
            return "f(X) itself is not finite"
        found: list[str] = []

        def watch(node: Node) -> Any:
            def look(gradients: Any, given: Any) -> None:
                if not found and _finite(given) and not _finite(gradients):
                    found.append(node.name())

            return node.register_hook(look)

        handles = [watch(node) for node in _nodes(y)]
        try:
            torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
    if not found:
        return ""
    name = found[0].split("Backward")[0].lower()
    remedy = f"; its slope is infinite at 0: {SMOOTH}" if name in ROOTS else ""
    return f"the derivative of {name} is not finite at this input{remedy}"


def _finite(tensors: Any) -> bool:
    return all(x is None or bool(x.isfinite().all()) for x in tensors)


def _nodes(y: Tensor) -> Iterator[Node]:
    """The nodes of the graph of y."""
    seen = set[Node]()
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]
