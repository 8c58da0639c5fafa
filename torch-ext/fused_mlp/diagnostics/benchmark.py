"""``benchmark``: times a user's model with and without fusion, on the user's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from html import escape
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..models import fuse
from ..models.methods import switching
from ..models.reading.attributes import modules_of, parameters_of
from ..models.report import FusionReport, in_html, lines, summary
from . import machine, timing

_ROUNDS = 15
_ORIGINAL, _FUSED = "original", "fused"


@dataclass(frozen=True)
class Timing:
    """The time of one call of a model: the median in milliseconds, and the interquartile range over the turns in units
    of the median. ``peak_bytes`` is the most GPU memory that a call allocates on top of what is already allocated;
    None on a CPU."""

    milliseconds: float
    spread: float
    peak_bytes: Optional[int]


@dataclass(frozen=True)
class Comparison:
    """The outcome of :func:`benchmark`; prints as a table.

    ``speedup`` is the median ratio of the original's time to the fused model's in the same turn, and ``spread`` the
    interquartile range of these ratios; a slowdown that affects both models cancels out. ``verdict`` is "faster",
    "even" (within 2%), "slower", or "too noisy to tell" if ``spread`` is above 15%. ``largest_difference`` is the
    largest elementwise difference of the two outputs, ``largest_value`` the largest magnitude in the original's.
    ``fusion`` is the report of :func:`fuse_mlps`.
    """

    model: str
    machine: str
    fusion: FusionReport
    original: Timing
    fused: Timing
    speedup: float
    spread: float
    verdict: str
    largest_difference: float
    largest_value: float

    def __str__(self) -> str:
        return "\n".join([*self._head(), *lines(self._rows()), *self._conclusions()])

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        head, conclusions = ("<br>".join(map(escape, each)) for each in (self._head(), self._conclusions()))
        return f"<p>{head}</p>{in_html(self._rows())}<p>{conclusions}</p>"

    def _head(self) -> List[str]:
        return [self.model, self.machine, summary(self.fusion.modules)]

    def _rows(self) -> List[Tuple[str, ...]]:
        on_gpu = self.original.peak_bytes is not None
        rows: List[Tuple[str, ...]] = [("", "time", "spread", *(["peak memory"] if on_gpu else []))]
        for name, each in ((_ORIGINAL, self.original), (_FUSED, self.fused)):
            ms = each.milliseconds
            time = f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
            memory = [f"{each.peak_bytes / 2**20:.1f} MiB"] if each.peak_bytes is not None else []
            rows.append((name, time, f"{each.spread:.0%}", *memory))
        return rows

    def _conclusions(self) -> List[str]:
        if self.spread > timing.NOISY:
            found = (
                f"{self.verdict}: the ratios spread by {self.spread:.0%}; above {timing.NOISY:.0%} there is no verdict"
            )
        else:
            found = f"speed-up {self.speedup:.2f}x: {self.verdict}"
        return [found, f"largest difference {self.largest_difference:.1e}, for values up to {self.largest_value:.1e}"]


def benchmark(model: nn.Module, inputs: Any, *, seconds: float = 10.0) -> Comparison:
    """Time a model unfused and with its MLPs fused, in interleaved turns, and compare the two outputs.

    The model runs in inference, without gradients, as it was prepared: on its device, in its dtype, with or without
    ``torch.compile``. Afterwards its state is restored, even if a call raises: modules that were fused before are
    fused, and no others. Nothing is copied.

    Args:
        model: a module in eval mode.
        inputs: the inputs of one call: a tensor, a tuple of positional arguments, or a mapping of keyword arguments
            such as a tokenizer returns.
        seconds: approximate total time of all turns.

    Returns:
        The times with their spread, the memory on a GPU, and the largest difference. Prints as a table.

    Raises:
        TypeError: ``model`` is not a module, ``inputs`` has another type, or the output holds no tensor.
        ValueError: ``model`` is in training mode, nothing in it can be fused here, or ``seconds`` is not positive.
    """
    call = _call_of(model, inputs)
    if model.training:
        raise ValueError("model must be in eval mode, got one in training mode: call model.eval() first")
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    modules = [module for _, module in modules_of(model)]
    given = _states(modules)
    try:
        for module in modules:
            switching.switch_back(module)
        states = {_ORIGINAL: _states(modules)}
        fusion = fuse.fuse_mlps(model)
        if not any(map(fuse.is_fused, modules)):
            raise ValueError(f"nothing in model can be fused here: {fusion}")
        states[_FUSED] = _states(modules)
        with torch.no_grad():
            return _compared(model, call, fusion, lambda name: _hold(modules, states[name]), seconds)
    finally:
        _hold(modules, given)


def _call_of(model: nn.Module, inputs: Any) -> Callable[[], Any]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(inputs, Tensor):
        return partial(model, inputs)
    if isinstance(inputs, Mapping):
        return partial(model, **inputs)
    if isinstance(inputs, tuple):
        return partial(model, *inputs)
    raise TypeError(f"inputs must be a tensor, a tuple or a mapping, got {type(inputs).__name__}")


def _states(modules: List[nn.Module]) -> List[Dict[str, Any]]:
    return [switching.saved(module) for module in modules]


def _hold(modules: List[nn.Module], states: List[Dict[str, Any]]) -> None:
    """Restore the methods of modules, as the same objects every time: new ones would make compiled code recompile."""
    with switching.lock:
        for module, state in zip(modules, states):
            switching.put_back(module, state)


def _compared(
    model: nn.Module, call: Callable[[], Any], fusion: FusionReport, hold: Callable[[str], None], seconds: float
) -> Comparison:
    def prepare(name: str) -> None:
        hold(name)
        call()  # the first call after a switch inspects the modules again

    outputs, peaks, iterations = {}, {}, {}
    for name in (_ORIGINAL, _FUSED):
        prepare(name)
        # A captured graph overwrites its result in the next call.
        outputs[name] = [tensor.clone() for tensor in _tensors(call())]
        iterations[name] = timing.iterations_within(call, seconds * 1e6 / (2 * _ROUNDS), least=1)
        peaks[name] = _peak_bytes(call, outputs[name])
    if not outputs[_ORIGINAL]:
        raise TypeError(f"the output of model must hold floating-point tensors to compare, got {type(call()).__name__}")
    runs = {name: call for name in outputs}
    turn = partial(timing.neighbours, runs, iterations, prepare)
    samples = timing.samples_in_turns({"": turn}, _ROUNDS)[""]
    times = {name: Timing(*timing.middle([each[f"{name} ms"] for each in samples]), peaks[name]) for name in runs}
    ratio, spread = timing.middle([each[f"{_FUSED} ratio"] for each in samples])
    pairs = list(zip(outputs[_ORIGINAL], outputs[_FUSED]))
    on_gpu = any(tensor.is_cuda for tensor in outputs[_ORIGINAL])
    dtype = next((parameter.dtype for parameter in parameters_of(model)), outputs[_ORIGINAL][0].dtype)
    return Comparison(
        model=f"{type(model).__name__}, {str(dtype).replace('torch.', '')}, in inference",
        machine=f"{machine.gpu() if on_gpu else machine.cpu()}, PyTorch {torch.__version__}",
        fusion=FusionReport(fusion.modules),  # without restore, which would undo the state that the model came with
        original=times[_ORIGINAL],
        fused=times[_FUSED],
        speedup=1 / ratio,
        spread=spread,
        verdict=timing.verdict(ratio, spread),
        largest_difference=max(_largest_difference(one, other) for one, other in pairs),
        largest_value=max(_largest(one) for one, _ in pairs),
    )


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a model's output: a tensor, or a container such as libraries return."""
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        yield from _tensors(vars(output))


def _largest_difference(one: Tensor, other: Tensor) -> float:
    wide = torch.promote_types(one.dtype, torch.float32)
    return _largest((one.to(wide) - other.to(wide)).masked_fill_(one == other, 0))  # equal infinities give 0


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _peak_bytes(call: Callable[[], Any], outputs: List[Tensor]) -> Optional[int]:
    device = next((tensor.device for tensor in outputs if tensor.is_cuda), None)
    if device is None:
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before
