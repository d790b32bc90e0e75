"""Self-attention as a map of tokens, in the papers' convention."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lipscope._ambient import unaffected
from lipscope._checks import abbreviate, check_fields
from lipscope._display import Displayed
from lipscope._types import UserError
from lipscope.attention.linearization import linearize
from lipscope.attention.rounding_scale import WeightNorms, weight_norms
from lipscope.attention.scores import L2, Dot, Kernel, augment, default_scale
from lipscope.fused.arguments import check_options
from lipscope.fused.primitive import attend
from lipscope.linalg.differentiate import check_input, check_one_device, check_tensor
from lipscope.linalg.operator import LinearOperator, steady


@dataclass(frozen=True, eq=False)
class SelfAttention(Displayed):
    """Self-attention as a map of tokens, in the papers' convention.

    For one head without biases, `f(X)_i = sum_j P_ij V x_j` with
    `P_ij = softmax over j of <Q x_i, K x_j> / sqrt(k)`. Tokens are the rows of `X`, of shape
    `[n, d]` or `[B, n, d]`. Weights have the layout of `torch.nn.Linear.weight`.

    Args:
        Q: Query weights, shape `[heads * k, d]`.
        K: Key weights, shape `[kv_heads * k, d]`.
        V: Value weights, shape `[kv_heads * m, d]`.
        O: Output weights, shape `[d', heads * m]`; without them the heads are concatenated.
        heads: Number of query heads.
        kv_heads: Number of key and value heads, a divisor of `heads`; `heads` by default.
        biases: Biases `(bq, bk, bv)` of the three projections, each a tensor or `None`.
        causal: Whether token `i` sees only the tokens up to itself.
        mask: Shape `[n, n]` or `[B, n, n]`. Boolean, `True` where `i` may attend to `j`, or
            floating point, added to the scores.
        kernel: `Dot()` or `L2()`; holds the scale, the softcap, the sinks and rotary positions.
        window: If given, token `i` sees only `window` tokens up to and including itself.
        padding: Shape `[n]` or `[B, n]`, `True` for real tokens.

    Raises:
        UserError: If shapes, dtypes or options do not fit together.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> f = ls.SelfAttention(I, I, I, causal=True)
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> f(X)[0].tolist()  # the first token sees only itself
        [1.0, 0.0]
        >>> f.jacobian(X).in_shape
        (2, 2)
    """

    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor | None = None
    heads: int = 1
    kv_heads: int | None = None
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None
    causal: bool = False
    mask: Tensor | None = None
    kernel: Kernel = Dot()
    window: int | None = None
    padding: Tensor | None = None

    def __post_init__(self) -> None:
        _check_weights(self)

    @cached_property
    def groups(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @cached_property
    def scale(self) -> float:
        """Factor of the scores."""
        return default_scale(self.kernel, self.Q.shape[0] // self.heads)

    def per_head(self, W: Tensor) -> Tensor:
        """Rows of K or V, or of their biases, for each query head: [H, size, ...]."""
        return W.unflatten(0, (self.groups, -1)).repeat_interleave(self.heads // self.groups, dim=0)

    def __call__(self, X: Tensor) -> Tensor:
        check_tokens(self, X)
        q, k, v = self.project(X)
        if isinstance(self.kernel, L2):
            q, k = augment(self.kernel, q, k)
        scale = 1.0 if isinstance(self.kernel, L2) else self.scale
        o = attend(
            q,
            k,
            v,
            scale=scale,
            causal=self.causal,
            window=self.window,
            mask=self.mask_per_head,
            padding=self.padding,
            softcap=self.kernel.softcap,
            sinks=self.kernel.sinks,
        )
        joined = o.transpose(-3, -2).flatten(-2)
        return joined if self.O is None else joined @ self.O.T

    def project(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., heads, n, k], keys [..., kv_heads, n, k], both rotated, and values."""
        biases = self.biases or (None, None, None)
        parts = []
        for weight, bias, count in zip(
            (self.Q, self.K, self.V), biases, (self.heads, self.groups, self.groups), strict=True
        ):
            y = X @ weight.T if bias is None else X @ weight.T + bias
            parts.append(y.unflatten(-1, (count, -1)).transpose(-3, -2))
        q, k, v = parts
        rope = self.kernel.rope if isinstance(self.kernel, Dot) else None
        return (q, k, v) if rope is None else (rope.turn(q), rope.turn(k), v)

    @cached_property
    def mask_per_head(self) -> Tensor | None:
        """The mask as `attend` takes it: [B, n, n] becomes [B, 1, n, n]."""
        return self.mask[:, None] if self.mask is not None and self.mask.ndim == 3 else self.mask

    @cached_property
    def weight_norms(self) -> WeightNorms:
        """Upper bounds of the norms of the weights, head by head."""
        return weight_norms(self)

    @unaffected
    def jacobian(self, X: Tensor) -> LinearOperator:
        """Return the Jacobian of the layer at `X` as a linear operator, in closed form.

        A product takes O(n^2) time and, for long sequences, O(n d) memory.
        """
        check_tokens(self, X)
        return steady(linearize(self, X, apart=False))

    def jacobian_on(self, X: Tensor, mesh: Any) -> LinearOperator:
        """Return the Jacobian at this process's tokens `X`, which the processes of a mesh share."""
        from lipscope.attention.sharded import sharded_jacobian  # which is built on this class

        return sharded_jacobian(self, X, mesh)

    def measure_of(self, X: Tensor) -> Any:
        """Return the uniform measure of the tokens of `X`, on which copies may move apart."""
        # By name: measures stand above this package and are built on it.
        import_module("lipscope.mean_field.measures").check_liftable(self)
        return import_module("lipscope.mean_field.measures").as_measure(X, self.causal)

    def head(self, h: int) -> SelfAttention:
        """Return head `h` as a layer of its own, without the output projection."""
        if not 0 <= h < self.heads:
            raise UserError(f"head {h} does not exist; the layer has heads 0 to {self.heads - 1}")
        group = h * self.groups // self.heads
        size = self.Q.shape[0] // self.heads
        values = self.V.shape[0] // self.groups
        own = slice(h * size, (h + 1) * size)
        keys = slice(group * size, (group + 1) * size)
        vals = slice(group * values, (group + 1) * values)
        biases = zip(self.biases or (None, None, None), (own, keys, vals), strict=True)
        sinks = self.kernel.sinks
        return replace(
            self,
            Q=self.Q[own],
            K=self.K[keys],
            V=self.V[vals],
            O=None,
            heads=1,
            kv_heads=None,
            biases=tuple(None if b is None else b[cut] for b, cut in biases),  # type: ignore[arg-type]  # three of them
            kernel=replace(self.kernel, sinks=None if sinks is None else sinks[h : h + 1]),
        )

    def heads_apart(self) -> HeadsApart:
        """Return the map of all heads side by side; its Jacobian is a batch with one per head."""
        return HeadsApart(self)

    def to(self, *args: Any, **kwargs: Any) -> SelfAttention:
        """Return a copy with its tensors moved or converted as by `Tensor.to`."""

        def move(x: Any) -> Any:
            if isinstance(x, Tensor):
                # A boolean mask must stay boolean: it follows to the device, not to the dtype.
                device = x.new_empty(0).to(*args, **kwargs).device
                return x.to(*args, **kwargs) if x.dtype.is_floating_point else x.to(device)
            if isinstance(x, tuple):
                return tuple(move(y) for y in x)
            if hasattr(x, "__dataclass_fields__"):
                return replace(x, **{f.name: move(getattr(x, f.name)) for f in fields(x)})
            return x

        return replace(self, **{f.name: move(getattr(self, f.name)) for f in fields(self)})

    def double(self) -> SelfAttention:
        """Return a copy in float64."""
        return self.to(torch.float64)


@dataclass(frozen=True, eq=False)
class HeadsApart(Displayed):
    """The heads of a layer side by side, X [n, d] -> [heads, n, m], or both with a batch B first.

    The Jacobian is a batch of `B * heads` operators, member-major.
    """

    layer: SelfAttention

    def __call__(self, X: Tensor) -> Tensor:
        joined = replace(self.layer, O=None)(X)
        return joined.unflatten(-1, (self.layer.heads, -1)).transpose(-3, -2)

    @unaffected
    def jacobian(self, X: Tensor) -> LinearOperator:
        check_tokens(self.layer, X)
        return steady(linearize(self.layer, X, apart=True))

    def jacobian_on(self, X: Tensor, mesh: Any) -> LinearOperator:
        from lipscope.attention.sharded import sharded_jacobian  # which is built on this class

        return sharded_jacobian(self, X, mesh)

    def double(self) -> HeadsApart:
        return HeadsApart(self.layer.double())


@dataclass(frozen=True, eq=False)
class FactoredAttention(SelfAttention):
    """L2 attention whose values are, by definition, `M_h` times the queries.

    The values are computed from the queries instead of the stored `V`, so that a rounding error of
    `V` is never multiplied by the size of the tokens. Only then does the layer have a Lipschitz
    constant over all inputs.

    Args:
        M: Shape `[heads, m, k]`, keyword only. All other arguments are those of `SelfAttention`,
            with `V = M_h Q_h` in every head (up to rounding), an `L2` kernel and no biases.

    Raises:
        UserError: If `V` is not `M Q`, or the kernel, the heads or the biases do not fit.

    Example:
        >>> import lipscope as ls
        >>> import torch
        >>> Q = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> M = torch.tensor([[[3.0]]], dtype=torch.float64)
        >>> f = ls.theorems.FactoredAttention(Q, Q, 3 * Q, kernel=ls.L2(), M=M)
        >>> [row.name for row in ls.bounds(f, ls.Everywhere(n=4)) if row.kind == "upper"]
        ['Kim et al., L2 attention', 'L2 attention']
    """

    M: Tensor = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (self.heads, self.V.shape[0] // self.heads, self.Q.shape[0] // self.heads)
        biased = any(bias is not None for bias in self.biases or ())
        if not isinstance(self.kernel, L2) or self.groups != self.heads or biased:
            raise UserError(
                "FactoredAttention needs an L2 kernel, as many key heads as query heads, "
                "and no biases"
            )
        if tuple(self.M.shape) != shape or self.M.dtype != self.Q.dtype:
            expected = f"shape [heads, m, k] = {shape} and the dtype of Q, {self.Q.dtype}"
            raise UserError(f"M must have {expected}, got {tuple(self.M.shape)} of {self.M.dtype}")
        check_one_device("Q", self.Q, M=self.M)
        Q, V = (W.unflatten(0, (self.heads, -1)).double() for W in (self.Q, self.V))
        M = self.M.double()
        # Loose enough for values rounded to bfloat16. A product that overflows is not compared.
        if ((V - M @ Q).norm(dim=(1, 2)) > 2**-6 * (M.norm(dim=(1, 2)) * Q.norm(dim=(1, 2)))).any():
            raise UserError("V is not M Q; pass V = M_h Q_h, head by head")

    def project(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().project(X)
        return q, k, q @ self.M.mT

    def head(self, h: int) -> FactoredAttention:
        def parts(f: SelfAttention) -> dict[str, Any]:
            return {part.name: getattr(f, part.name) for part in fields(SelfAttention)}

        plain = SelfAttention(**parts(self)).head(h)
        return FactoredAttention(**parts(plain) | {"biases": None}, M=self.M[h : h + 1])


def _check_weights(f: SelfAttention) -> None:
    for name, W in (("Q", f.Q), ("K", f.K), ("V", f.V), ("O", f.O)):
        if W is None and name == "O":
            continue
        if not isinstance(W, Tensor) or W.ndim != 2:
            got = tuple(W.shape) if isinstance(W, Tensor) else type(W).__name__
            raise UserError(f"{name} must be a matrix of shape [rows, d], got {got}")
        check_tensor(name, W)
        if W.dtype != f.Q.dtype:
            raise UserError(f"{name} is {W.dtype} and Q is {f.Q.dtype}; give all weights one dtype")
    check_fields(f)
    if f.biases is not None and (not isinstance(f.biases, tuple | list) or len(f.biases) != 3):
        raise UserError(f"biases must be three, (bq, bk, bv), got {abbreviate(f.biases)}")
    d = f.Q.shape[1]
    if not 1 <= f.groups <= f.heads or f.heads % f.groups:
        raise UserError(f"heads={f.heads} must be a multiple of kv_heads={f.groups}")
    for name, W, count in (("Q", f.Q, f.heads), ("K", f.K, f.groups), ("V", f.V, f.groups)):
        if W.shape[1] != d or W.shape[0] % count or W.shape[0] == 0:
            raise UserError(f"{name} must have shape [{count} * size, {d}], got {tuple(W.shape)}")
    size = f.Q.shape[0] // f.heads
    values = f.V.shape[0] // f.groups
    if f.K.shape[0] // f.groups != size:
        raise UserError(
            f"Q has {size} rows per head and K has {f.K.shape[0] // f.groups}; they must agree"
        )
    if f.O is not None and f.O.shape[1] != f.heads * values:
        raise UserError(
            f"O must have shape [d, {f.heads * values}] (heads * rows of V per head), "
            f"got {tuple(f.O.shape)}"
        )
    for name, b, W in zip(
        ("bq", "bk", "bv"), f.biases or (None,) * 3, (f.Q, f.K, f.V), strict=True
    ):
        if b is not None:
            if not isinstance(b, Tensor):
                raise UserError(f"{name} must be a tensor or None, got {abbreviate(b)}")
            if b.shape != W.shape[:1]:
                raise UserError(f"{name} must have shape [{W.shape[0]}], got {tuple(b.shape)}")
            check_tensor(name, b)
            if b.dtype != f.Q.dtype:
                raise UserError(
                    f"{name} is {b.dtype} and Q is {f.Q.dtype}; give all weights one dtype"
                )
    options = (f.mask, f.padding, f.kernel.sinks, f.kernel.softcap, f.window)
    if any(option is not None for option in options):
        check_options(*options)
    bq, bk, bv = f.biases or (None, None, None)
    check_one_device("Q", f.Q, K=f.K, V=f.V, O=f.O, bq=bq, bk=bk, bv=bv)
    check_one_device("Q", f.Q, mask=f.mask, padding=f.padding, sinks=f.kernel.sinks)
    if f.kernel.sinks is not None and f.kernel.sinks.shape != (f.heads,):
        raise UserError(
            f"sinks must have shape [{f.heads}], one logit per head, "
            f"got {tuple(f.kernel.sinks.shape)}"
        )
    if f.mask is not None and f.mask.dtype.is_floating_point and f.mask.dtype != f.Q.dtype:
        raise UserError(f"mask is {f.mask.dtype} and Q is {f.Q.dtype}; convert one of them")


def check_tokens(f: SelfAttention, X: Tensor, tokens: int | None = None) -> None:
    """Raise unless X fits f; `tokens` is their number where X holds only some of them."""
    check_input(X)
    d = f.Q.shape[1]
    if X.shape[-1] != d:
        raise UserError(
            f"X has token size {X.shape[-1]} (shape {tuple(X.shape)}); "
            f"the weights read tokens of size {d}"
        )
    if X.dtype != f.Q.dtype:
        raise UserError(
            f"X is {X.dtype} and the weights are {f.Q.dtype}; "
            "convert one of them, for example with f.to(X.dtype)"
        )
    check_one_device("f", f.Q, X=X)
    n = tokens or X.shape[-2]
    B = X.shape[0] if X.ndim == 3 else None
    allowed = [(n, n)] if B is None else [(n, n), (B, n, n)]
    if f.mask is not None and tuple(f.mask.shape) not in allowed:
        raise UserError(
            f"mask must have shape {' or '.join(map(str, allowed))} for X of shape "
            f"{tuple(X.shape)}, got {tuple(f.mask.shape)}"
        )
    # amax is NaN if any entry is, and reads an expanded mask without materialising it, unlike
    # isnan() or a comparison.
    if f.mask is not None and f.mask.dtype.is_floating_point and not f.mask.amax() < torch.inf:
        raise UserError(
            "mask holds NaN or +inf; the entries of an additive mask must be finite or -inf"
        )
    shapes = [(n,)] if B is None else [(n,), (B, n)]
    if f.padding is not None and tuple(f.padding.shape) not in shapes:
        raise UserError(
            f"padding must have shape {' or '.join(map(str, shapes))}, got {tuple(f.padding.shape)}"
        )
