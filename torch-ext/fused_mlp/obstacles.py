"""When a module must be called as it is: what its call does that reading its weights, or its class, would skip.

A projection may be wrapped by an adapter, quantised, sharded, offloaded or watched by hooks. The rule is narrow on
purpose: what is not known to be plain is called.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor, nn
from torch.nn.modules import module as _torch_module

_CONV1D = "transformers.pytorch_utils.Conv1D"  # GPT-2's linear layer, weight [in, out]


def of_call(module: nn.Module, forward_may_differ: bool = False) -> Optional[str]:
    """Why calling ``module`` is more than running the forward of its class, or None."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks"
    own = None if forward_may_differ else module.__dict__.get("forward")
    if own is not None and getattr(own, "__func__", None) is not type(module).forward and own.__module__ != _LAYERS:
        return "has a forward of its own"
    if (
        _torch_module._global_forward_hooks
        or _torch_module._global_forward_pre_hooks
        or _torch_module._global_backward_hooks
        or _torch_module._global_backward_pre_hooks
    ):
        return "global module hooks are set"
    return None


def of_projection(projection: nn.Module) -> Optional[str]:
    """Why the weight of ``projection`` must not be used without calling it, or None if it is a plain linear layer."""
    kind = type(projection)
    if kind is not nn.Linear and not _is_conv1d(kind):
        return f"is a {kind.__name__}"
    obstacle = of_call(projection)
    if obstacle is not None:
        return obstacle
    weight = projection.weight
    if type(weight) not in (nn.Parameter, Tensor):
        return f"its weight is a {type(weight).__name__}"
    if not weight.dtype.is_floating_point:
        return f"its weight is {weight.dtype}"
    return None


def weight_of(projection: nn.Module) -> Tensor:
    """The weight of a plain projection as ``[out, in]``."""
    return projection.weight if type(projection) is nn.Linear else projection.weight.t()


def _is_conv1d(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" == _CONV1D


# Forwards of this package's own layers compute what the class computes.
_LAYERS = __name__.rpartition(".")[0] + ".layers"
