"""Stand-in for ``native`` in a build without compiled ops: it has the same names and refuses every call."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

DEVICE_TYPE: Optional[str] = None

_DTYPES: Tuple[torch.dtype, ...] = ()

plain_modules = None


def refusal(op: str, x: Tensor) -> Optional[str]:
    """Return the reason: this backend always refuses."""
    return "this build has no compiled ops"


def __getattr__(name: str) -> Callable[..., Any]:
    """Stand in for the ops of ``native``, which other modules bind at import and never call after a refusal."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent


def _absent(*args: Any) -> Any:
    raise NotImplementedError("this build has no compiled ops")
