"""Weights of bounded norm: spectral normalisation and sigma-reparam as torch parametrizations.

Both divide by an upper bound on the norm that is recomputed in every pass, whereas a running power
iteration divides by a lower bound. Neither gives dot-product attention a Lipschitz constant; what
they do give on a ball of tokens, the theorems tell.

    from lipscope.nn.parametrize import sigma_reparametrise, spectrally_normalise

Linear weights are those of nn.Linear, of nn.MultiheadAttention (queries, keys and values
separately) and of transformers' Conv1D (one matrix, whatever is stacked in it). Other matrices, and
weights tied to an embedding, are left unchanged; a LeftAsTheyAre warning names them. Embeddings are
lookup tables, so they are left out without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from lipscope._ambient import entry_point
from lipscope._checks import check_positive
from lipscope._types import UserError
from lipscope.nn.matrix_norms import of_norm

MULTIHEAD = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class LeftAsTheyAre(UserWarning):
    """Some weights were not normalised; the message names them."""


class SpectralNormalised(nn.Module):
    """W constant / ||W||, of norm at most `constant`, for each of `parts` stacked matrices."""

    def __init__(self, constant: float = 1.0, parts: int = 1) -> None:
        super().__init__()
        check_positive("constant", constant)
        self.constant = float(constant)
        self.parts = parts

    def forward(self, W: Tensor) -> Tensor:
        return of_norm(self.constant, W.unflatten(0, (self.parts, -1))).flatten(0, 1)

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}"


class SigmaReparam(nn.Module):
    """The parametrization W gamma / ||W|| with a learned gamma (Zhai et al. 2023).

    Its spectral norm is |gamma|, initially 1. `sigma_reparametrise` registers it on the linear
    weights of a module.

    Args:
        parts: Number of matrices stacked in W; each has its own gamma.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> W = torch.diag(torch.tensor([3.0, 4.0]))
        >>> round(torch.linalg.matrix_norm(ls.nn.SigmaReparam()(W), 2).item(), 3)
        1.0
    """

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(() if parts == 1 else parts))

    def forward(self, W: Tensor) -> Tensor:
        gamma = self.gamma.reshape(-1)
        return of_norm(gamma, W.unflatten(0, (len(gamma), -1))).flatten(0, 1)


@entry_point
def spectrally_normalise(module: nn.Module, constant: float = 1.0) -> nn.Module:
    """Give every linear weight of a module the spectral norm `constant`, in place.

    Args:
        module: The module; its linear weights become parametrized.
        constant: The spectral norm, positive.

    Returns:
        The same module.

    Raises:
        UserError: If no linear weight can be normalised.

    Warns:
        LeftAsTheyAre: If other matrices, or weights tied to an embedding, are left unchanged.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> layer = ls.nn.spectrally_normalise(torch.nn.Linear(4, 4), constant=0.5)
        >>> round(torch.linalg.matrix_norm(layer.weight, 2).item(), 3)
        0.5
    """
    check_positive("constant", constant)
    return _parametrize(module, lambda parts: SpectralNormalised(constant, parts))


@entry_point
def sigma_reparametrise(module: nn.Module) -> nn.Module:
    """Give every linear weight of a module a learned spectral norm |gamma|, in place.

    Args:
        module: The module; its linear weights become parametrized by `SigmaReparam`.

    Returns:
        The same module.

    Raises:
        UserError: If no linear weight can be normalised.

    Warns:
        LeftAsTheyAre: If other matrices, or weights tied to an embedding, are left unchanged.

    Example:
        >>> import torch
        >>> import lipscope as ls
        >>> layer = ls.nn.sigma_reparametrise(torch.nn.Linear(4, 4))
        >>> layer.parametrizations.weight[0].gamma.item()
        1.0
    """
    return _parametrize(module, SigmaReparam)


def _parametrize(module: nn.Module, make: Callable[[int], nn.Module]) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise UserError(
            f"module must be a torch.nn.Module, got {type(module).__name__}; "
            "pass the module whose weights are to be normalised"
        )
    places = list(_linear_weights(module))
    linear = {(part, attribute) for _, part, attribute in places}
    names = {id(getattr(part, attribute)): name for name, part, attribute in places}
    # Linear weights that another module uses directly, such as an embedding.
    tied = {
        id(W): f"{names[id(W)]} (tied to {path}.{attribute})"
        for path, part in module.named_modules()
        for attribute, W in part._parameters.items()
        if id(W) in names and (part, attribute) not in linear
    }
    made: dict[int, nn.Module] = {}
    for _, part, attribute in places:
        W = getattr(part, attribute)
        if id(W) in tied:
            continue
        # Linear layers that share a weight share its parametrization, gamma included.
        new = made.setdefault(
            id(W), make(3 if attribute == "in_proj_weight" else 1).to(W.device, W.dtype)
        )
        register_parametrization(part, attribute, new)
    if not made:
        why = f"all of them are tied: {'; '.join(tied.values())}" if tied else "there is none"
        raise UserError(
            f"{type(module).__name__} has no linear weight that can be normalised: {why}"
        )
    embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding))
    known = {id(W) for part in embeddings for W in part.parameters()} | set(made)
    other = [name for name, W in module.named_parameters() if W.ndim > 1 and id(W) not in known]
    if tied or other:
        left = ", ".join([*tied.values(), *other])
        warnings.warn(f"left as they are: {left}", LeftAsTheyAre, stacklevel=3)
    return module


def _linear_weights(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every linear weight, checked: its dotted name, the module that holds it, its name there."""
    for path, part in module.named_modules():
        names: tuple[str, ...] = ()
        # Conv1D is the linear layer of transformers, with weights [in, out]; not imported here.
        conv1d = any(kind.__name__ == "Conv1D" for kind in type(part).__mro__)
        conv1d = conv1d and getattr(getattr(part, "weight", None), "ndim", 0) == 2
        if isinstance(part, nn.Linear) or (conv1d and hasattr(part, "nf")):
            names = ("weight",)
        elif isinstance(part, nn.MultiheadAttention):
            names = tuple(name for name in MULTIHEAD if getattr(part, name, None) is not None)
        for attribute in names:
            name = f"{path or type(part).__name__}.{attribute}"
            _check(name, part, attribute)
            yield name, part, attribute


def _check(name: str, part: nn.Module, attribute: str) -> None:
    if is_parametrized(part, attribute):
        raise UserError(f"the weight {name} is already parametrized; start from a plain module")
    if attribute not in part._parameters:
        raise UserError(
            f"the weight {name} is computed by a hook, as torch's older spectral_norm does; "
            "remove the hook first"
        )
    W = getattr(part, attribute)
    if isinstance(W, UninitializedParameter):
        raise UserError(f"the weight {name} is uninitialized; run the module once on tokens first")
    if not W.dtype.is_floating_point or W.element_size() < 2:
        raise UserError(
            f"the weight {name} is stored in {W.dtype}; start from weights of 16 bits or more"
        )
