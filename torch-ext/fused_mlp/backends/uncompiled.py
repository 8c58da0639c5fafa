"""In the place of ``native`` where a build holds no compiled ops: the same names, and it takes no call."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

DEVICE_TYPE: Optional[str] = None

_DTYPES: Tuple[torch.dtype, ...] = ()

plain_modules = None


def refusal(op: str, x: Tensor) -> Optional[str]:
    """Always refuses."""
    return "this build holds no compiled ops"


def __getattr__(name: str) -> Callable[..., Any]:
    """The ops of ``native``, which other modules bind when they are imported, and never call where it refuses."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent


def _absent(*args: Any) -> Any:
    raise NotImplementedError("this build holds no compiled ops")
