"""Chooses a backend for a call, and can say why."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Dict, Iterator, Optional, Tuple

from torch import Tensor

from .backends import native, reference, triton

_BACKENDS: Dict[str, ModuleType] = {native.DEVICE_TYPE: native, "triton": triton, "torch": reference}
_NAMES = ("cuda", "triton", "cpu", "torch")

# Measured order: the compiled ops win wherever they exist, the Triton kernels where a build has no code for the GPU.
_AUTO = ("cuda", "triton") if native.DEVICE_TYPE == "cuda" else ("cpu",)

_forced = "auto"  # a plain global: torch.compile guards on it, which it does not on a context variable


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces an implementation for the calls inside a ``with`` block, in all threads.

    ``name`` is ``"cuda"`` (compiled CUDA C++), ``"triton"``, ``"cpu"`` (compiled C++), ``"torch"`` (the operations a
    model written in PyTorch runs) or ``"auto"`` (the default choice). Raises ValueError for another name; a call that
    the forced implementation does not take raises ValueError too.
    """
    if name not in (*_NAMES, "auto"):
        raise ValueError(f"backend must be one of {', '.join(_NAMES)} or auto, got {name!r}")
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def select(op: str, x: Tensor) -> ModuleType:
    """The backend module that takes ``op`` on ``x``; ValueError if one is forced and refuses."""
    if _forced != "auto":
        reason = _forced_refusal(_forced, op, x)
        if reason is not None:
            raise ValueError(f"backend {_forced!r} is forced, and it does not take {op}: {reason}")
        return _BACKENDS[_forced]
    for name in _AUTO:
        if _BACKENDS[name].refusal(op, x) is None:
            return _BACKENDS[name]
    return reference


def reasoned(op: str, x: Tensor) -> Tuple[str, str]:
    """Name of the backend that :func:`select` takes, and why, in a sentence."""
    if _forced != "auto":
        select(op, x)
        return _forced, "forced by backend()"
    refusals = []
    for name in _AUTO:
        reason = _BACKENDS[name].refusal(op, x)
        if reason is None:
            return name, "; ".join(refusals) or "first choice for this device and dtype"
        refusals.append(f"not {name}: {reason}")
    return "torch", "; ".join(refusals)


def _forced_refusal(name: str, op: str, x: Tensor) -> Optional[str]:
    if name not in _BACKENDS:
        return f"this build holds {native.DEVICE_TYPE} kernels"
    return _BACKENDS[name].refusal(op, x)
