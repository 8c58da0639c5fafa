"""``check``: reports how the package runs on this machine, according to the code that makes these decisions."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Set, Tuple

import torch
from torch import Tensor

from .. import dispatch, functional
from ..activations import get_activation
from ..autograd import training
from ..backends import VERSION, native, plans
from ..models.report import in_html, lines
from . import machine
from .explanation import Explanation, explain

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROWS = tuple(1 << power for power in range(13))
_WIDTH, _HIDDEN = 1024, 4096
_EXPERTS, _TOP_K, _EXPERT_HIDDEN = 8, 2, 512


@dataclass(frozen=True)
class Check:
    """The outcome of :func:`check`; prints as a table.

    ``products`` maps each product and dtype to the parts that the package computes, by number of rows. ``kernels``
    names the CPU instruction sets or GPU architectures of the chosen kernels. ``advice`` lists things to try.
    """

    variant: str
    version: str
    machine: str
    kernels: Tuple[str, ...]
    products: Dict[str, Dict[str, str]]
    advice: Tuple[str, ...]

    def __str__(self) -> str:
        table = lines(self._rows())
        advice = (f"- {each}" for each in self.advice)
        return "\n".join([*self._head(), "", _CAPTION, "", *table, "", "To try:", *advice])

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        head = "<br>".join(map(escape, self._head()))
        advice = "".join(f"<li>{escape(each)}</li>" for each in self.advice)
        return f"<p>{head}</p><p>{escape(_CAPTION)}</p>{in_html(self._rows())}<p>To try:</p><ul>{advice}</ul>"

    def _head(self) -> List[str]:
        return [
            f"fused_mlp version {self.version}, variant {self.variant}",
            f"PyTorch {torch.__version__}, Python {platform.python_version()}",
            self.machine,
            f"kernels used here: {', '.join(self.kernels) or 'none'}",
        ]

    def _rows(self) -> List[Tuple[str, ...]]:
        rows = [(name, *by_dtype.values()) for name, by_dtype in self.products.items()]
        return [("", *map(_name, _DTYPES)), *rows]


_CAPTION = f"""Which kernels run, by number of rows ({_WIDTH} features, {_HIDDEN} hidden):
  GEMM: this package's GEMM, with the activation in its epilogue; torch: PyTorch's operations;
  pointwise: PyTorch's GEMM, and one kernel of this package for the rest."""


def check() -> Check:
    """Report what the package does on this machine: which products its kernels compute, for which dtypes and rows.

    The answers are those that real calls get, on empty operands of one width with 1, 2, 4 and up to 4,096 rows. Nothing
    is computed or timed; :func:`benchmark` times a model. Prints as a table.
    """
    device = _device()
    products: Dict[str, Dict[str, str]] = {}
    kernels: Set[str] = set()
    for dtype in _DTYPES:
        kinds: Dict[str, List[str]] = {}
        for rows in _ROWS:
            for name, (kind, parts) in _asked(rows, dtype, device).items():
                kinds.setdefault(name, []).append(kind)
                kernels.update(part.implementation if part.fused else part.pointwise or "" for part in parts)
        for name, of_rows in kinds.items():
            products.setdefault(name, {})[_name(dtype)] = _in_words(of_rows)
    return Check(
        variant=Path(__file__).resolve().parents[1].name,
        version=VERSION,
        machine=machine.cpu() if device == "cpu" else machine.gpu(),
        kernels=tuple(sorted(kernels - {"", "epilogue"})),
        products=products,
        advice=tuple(_advice(device, products)),
    )


def _device() -> str:
    """Return the type of device that models of this process would use, among those this build has kernels for."""
    if native.DEVICE_TYPE != "cpu" and torch.cuda.is_available():
        return "cuda"
    return "xpu" if native.DEVICE_TYPE is None and torch.xpu.is_available() else "cpu"


def _asked(rows: int, dtype: torch.dtype, device: str) -> Dict[str, Tuple[str, Sequence[plans.Part]]]:
    """Return the kind of each product of a fused model with ``rows`` rows, and the parts that determine it."""

    def empty(*shape: int, trained: bool = False) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=trained)

    x, hidden, down = empty(rows, _WIDTH), empty(rows, _HIDDEN), empty(_WIDTH, _HIDDEN)
    up, gate = empty(_HIDDEN, _WIDTH), empty(_HIDDEN, _WIDTH, trained=True)
    chosen = torch.empty(rows, _TOP_K, dtype=torch.int64, device=device)
    experts = empty(_EXPERTS, 2 * _EXPERT_HIDDEN, _WIDTH), empty(_EXPERTS, _WIDTH, _EXPERT_HIDDEN)
    explanations = {
        "gate and up": explain(functional.gated_linear, x, up, up),
        "linear, activation": explain(functional.linear, x, up, activation="gelu"),
        "linear": explain(functional.linear, hidden, down),
        "experts": explain(functional.experts_mlp, x, chosen, empty(rows, _TOP_K), *experts),
        "gated MLP, trained": explain(functional.gated_mlp, x, gate, up, down),
        "MLP, trained": explain(functional.mlp, x, gate, down),
        "act(gate) * up": explain(functional.act_and_mul, hidden, hidden),
    }
    asked = {name: _kind_and_parts(found) for name, found in explanations.items()}
    # Unlike the functions, a fused model leaves to torch any call that saves too little.
    gelu = get_activation("gelu").code
    is_left = {
        f"{name}, trained": rows < training.least_rows(op, op == "gated_mlp", gelu, gate, training.KEPT)
        for name, op in (("gated MLP", "gated_mlp"), ("MLP", "mlp"))
    }
    is_left["act(gate) * up"] = dispatch.is_small_product(hidden)
    return {name: ("torch", ()) if is_left.get(name) else found for name, found in asked.items()}


def _kind_and_parts(found: Explanation) -> Tuple[str, Sequence[plans.Part]]:
    trained = any(isinstance(each, plans.Kept) for each in found.parts)
    parts = found.parts[0].gemms if trained else found.parts
    if any(part.fused for part in parts):
        return "GEMM", parts
    # A product of two tensors has no parts, and a backward has pointwise kernels between its GEMMs in any case.
    is_op = trained or not parts or any(part.pointwise not in (None, "epilogue") for part in parts)
    return "pointwise" if is_op and found.implementation != "torch" else "torch", parts


def _in_words(kinds: Sequence[str]) -> str:
    """Describe the kinds by number of rows, such as "torch to 8, GEMM above"."""
    ends = [(kind, rows) for kind, rows, after in zip(kinds, _ROWS, [*kinds[1:], ""]) if after != kind]
    words = [f"{kind} to {rows}" for kind, rows in ends[:-1]]
    return ", ".join([*words, ends[-1][0] + (" above" if words else "")])


def _advice(device: str, products: Dict[str, Dict[str, str]]) -> Iterator[str]:
    wide, narrow = (sum("GEMM" in by_dtype[name] for by_dtype in products.values()) for name in ("float32", "bfloat16"))
    if narrow > wide:
        yield "cast the model to torch.bfloat16: this package has kernels for more of its GEMMs"
    if native.DEVICE_TYPE == "cpu" and torch.cuda.is_available():
        yield 'for models on the GPU, load the GPU build: get_kernel(..., backend="cuda")'
    if native.DEVICE_TYPE == "cuda" and device == "cpu":
        yield 'this build is for GPUs, but PyTorch finds none: get_kernel(..., backend="cpu") loads the CPU build'
    if native.DEVICE_TYPE is None:
        yield 'backend("triton") runs the Triton kernels of this build, which are untested on this kind of GPU'
    if native.DEVICE_TYPE == device == "cuda":
        refused = native.refusal("linear", torch.empty(0, device=device))
        yield from [] if refused is None else [f"this build cannot run here: {refused}"]
    if "FUSED_MLP_CPU_ISA" in os.environ and native.DEVICE_TYPE == "cpu":
        yield f"unset FUSED_MLP_CPU_ISA, which limits the kernels to {os.environ['FUSED_MLP_CPU_ISA']}"
    yield "benchmark(model, inputs) times your model; explain(model) says what is not fused, and why"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")
