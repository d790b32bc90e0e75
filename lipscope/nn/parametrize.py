"""Weights of bounded norm: spectral normalisation and sigma-reparam as torch parametrizations.

Both divide by an upper bound of the norm taken anew in every pass, where a running power iteration divides by a lower
one. Neither gives dot-product attention a Lipschitz constant; on a ball of tokens the theorems say what they do give.

    from lipscope.nn.parametrize import sigma_reparametrise, spectrally_normalise

Linear weights are those of nn.Linear, of nn.MultiheadAttention (queries, keys and values each for themselves) and of
transformers' Conv1D (one matrix, whatever is stacked in it). Other matrices, and weights tied to an embedding, are left
as they are; a LeftAsTheyAre warning names them. Embeddings are tables and go without saying.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from lipscope._checks import check_positive
from lipscope._types import UserError
from lipscope.nn.matrix_norms import of_norm

MULTIHEAD = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

Place = tuple[str, nn.Module, str]
"""The dotted name of a weight, the module that holds it and its name there."""


class LeftAsTheyAre(UserWarning):
    """Some weights were not normalised; the message names them."""


class SpectralNormalised(nn.Module):
    """W constant / ||W||: the norm is `constant`, or less by what rounding may add, and the direction is learned.

    W may be `parts` matrices on top of each other, each of which is treated so.
    """

    def __init__(self, constant: float = 1.0, parts: int = 1) -> None:
        super().__init__()
        check_positive("constant", constant)
        self.constant, self.parts = float(constant), parts

    def forward(self, W: Tensor) -> Tensor:
        return of_norm(self.constant, W.unflatten(0, (self.parts, -1))).flatten(0, 1)

    def extra_repr(self) -> str:
        return f"constant={self.constant:g}"


class SigmaReparam(nn.Module):
    """W gamma / ||W|| with a learned gamma for each part, 1 at first (Zhai et al. 2023): the norm is |gamma|."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(() if parts == 1 else parts))

    def forward(self, W: Tensor) -> Tensor:
        gamma = self.gamma.reshape(-1)
        return of_norm(gamma, W.unflatten(0, (len(gamma), -1))).flatten(0, 1)


def spectrally_normalise(module: nn.Module, constant: float = 1.0) -> nn.Module:
    """Every linear weight inside gets the spectral norm `constant`; the module is returned, others are warned of."""
    check_positive("constant", constant)
    return _parametrize(module, lambda parts: SpectralNormalised(constant, parts))


def sigma_reparametrise(module: nn.Module) -> nn.Module:
    """Every linear weight inside gets the norm |gamma|, gamma learned; the module is returned, others are warned of."""
    return _parametrize(module, SigmaReparam)


def _parametrize(module: nn.Module, make: Callable[[int], nn.Module]) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise UserError(
            f"a torch.nn.Module is wanted, whose weights can be normalised, got {type(module).__name__}"
        )
    places = list(_linear_weights(module))
    for place in places:
        _check(*place)
    tied = _tied_elsewhere(module, places)
    chosen = [place for place in places if id(_weight(place)) not in tied]
    if not chosen:
        why = f"all are tied to others: {'; '.join(tied.values())}" if tied else "there is none"
        raise UserError(
            f"{type(module).__name__} holds no linear weight that could be normalised: {why}"
        )
    made: dict[int, nn.Module] = {}
    for name, part, attribute in chosen:
        W = _weight((name, part, attribute))
        # Linear layers that share a weight share what it is divided by, and multiplied with.
        new = made.setdefault(
            id(W), make(3 if attribute == "in_proj_weight" else 1).to(W.device, W.dtype)
        )
        register_parametrization(part, attribute, new)
    left = [*tied.values(), *_other_matrices(module, set(made))]
    if left:
        warnings.warn(f"left as they are: {', '.join(left)}", LeftAsTheyAre, stacklevel=3)
    return module


def _linear_weights(module: nn.Module) -> Iterator[Place]:
    for path, part in module.named_modules():
        names: tuple[str, ...] = ()
        if isinstance(part, nn.Linear) or _is_conv1d(part):
            names = ("weight",)
        elif isinstance(part, nn.MultiheadAttention):
            names = tuple(name for name in MULTIHEAD if getattr(part, name, None) is not None)
        yield from ((f"{path or type(part).__name__}.{name}", part, name) for name in names)


def _is_conv1d(part: nn.Module) -> bool:
    """transformers' linear layer with a weight [in, out]; that package is not asked, it may not be there."""
    named = any(kind.__name__ == "Conv1D" for kind in type(part).__mro__)
    return named and hasattr(part, "nf") and getattr(getattr(part, "weight", None), "ndim", 0) == 2


def _weight(place: Place) -> Tensor:
    return getattr(place[1], place[2])


def _check(name: str, part: nn.Module, attribute: str) -> None:
    if is_parametrized(part, attribute):
        raise UserError(f"the weight {name} is parametrized already; start from a plain module")
    if attribute not in part._parameters:
        raise UserError(
            f"the weight {name} is made by a hook, as of torch's older spectral_norm; remove that first"
        )
    W = getattr(part, attribute)
    if isinstance(W, UninitializedParameter):
        raise UserError(f"the weight {name} has no size yet; run the module once on tokens first")
    if not W.dtype.is_floating_point or W.element_size() < 2:
        raise UserError(
            f"the weight {name} is stored in {W.dtype}; start from weights of 16 bits or more"
        )


def _tied_elsewhere(module: nn.Module, places: list[Place]) -> dict[int, str]:
    """Linear weights that something else reads as they are, such as an embedding: by id, in words."""
    linear = {(part, attribute) for _, part, attribute in places}
    names = {id(_weight(place)): place[0] for place in places}
    return {
        id(W): f"{names[id(W)]} (tied to {path}.{attribute})"
        for path, part in module.named_modules()
        for attribute, W in part._parameters.items()
        if id(W) in names and (part, attribute) not in linear
    }


def _other_matrices(module: nn.Module, made: set[int]) -> list[str]:
    """Names of weights with two dimensions or more that are neither linear nor tables of an embedding."""
    tables = {
        id(W)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for W in part.parameters()
    }
    return [
        name for name, W in module.named_parameters() if W.ndim > 1 and id(W) not in made | tables
    ]
