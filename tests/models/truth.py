"""What a model's maps are, by hooks on the whole model and dense autograd."""

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lipscope.models.maps import Float64


class Truth:
    """A float64 copy of a model on eager attention, run whole: tokens put in here, read there."""

    def __init__(self, model: PreTrainedModel):
        self.model = copy.deepcopy(model).double().eval().requires_grad_(False)
        for module in self.model.modules():
            if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
                module.config._attn_implementation_internal = "eager"
                module.config._experts_implementation_internal = "eager"
                module.config.use_cache = False
        self.trunk = self.model.base_model
        if getattr(model.config, "is_encoder_decoder", False):
            self.trunk = self.model.get_encoder()

    def tokens(self, inputs: dict[str, Tensor], path: str, call: int) -> Tensor:
        """What enters the module at `path` at its `call`-th call."""
        return self._run(inputs, (path, call, None), None)

    def value(
        self,
        inputs: dict[str, Tensor],
        path: str,
        call: int,
        x: Tensor,
        tap: tuple[str, str] | None,
    ) -> Tensor:
        """The tokens seen at `tap` (None: at the end) when x enters the module at `path`."""
        y = self._run(inputs, (path, call, x), tap)
        return y if y.ndim == 3 else y[None]

    def jacobian(
        self, inputs: dict[str, Tensor], path: str, call: int, tap: tuple[str, str] | None
    ) -> Tensor:
        """The dense Jacobian [outputs, inputs] of that map, for a batch of one."""
        x = self.tokens(inputs, path, call)
        J = torch.autograd.functional.jacobian(
            lambda z: self.value(inputs, path, call, z, tap), x, vectorize=True
        )
        assert isinstance(J, Tensor)
        return J.reshape(-1, x.numel())

    def _run(
        self,
        inputs: dict[str, Tensor],
        entry: tuple[str, int, Tensor | None],
        tap: tuple[str, str] | None,
    ) -> Tensor:
        path, call, x = entry
        calls, entered, seen = 0, False, []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal calls, entered
            calls += 1
            if calls - 1 != call:
                return None
            entered = True
            if x is None:
                seen.append(args[0] if args else kwargs["hidden_states"])
                return None
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        def at_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            if entered:
                seen.append(args[0] if args else kwargs["hidden_states"])

        def at_output(module: nn.Module, args: Any, output: Any) -> None:
            if entered:
                seen.append(output if isinstance(output, Tensor) else output[0])

        with ExitStack() as stack:
            target = self.trunk.get_submodule(path)
            stack.callback(target.register_forward_pre_hook(enter, with_kwargs=True).remove)
            if tap is not None:
                place = self.trunk.get_submodule(tap[0])
                hook = (
                    place.register_forward_pre_hook(at_input, with_kwargs=True)
                    if tap[1] == "input"
                    else place.register_forward_hook(at_output)
                )
                stack.callback(hook.remove)
            stack.enter_context(Float64())
            last = getattr(self.trunk(**inputs), "last_hidden_state", None)
        found = seen[0] if seen else last
        assert found is not None, "this model has no last hidden state: give a tap"
        return found
