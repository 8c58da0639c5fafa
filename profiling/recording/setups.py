"""The profiled set-ups: a linear layer and the gated MLP, in each way to compute it, with the expected traces."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import environment  # noqa: F401
import expectations as expect
import kernels
import plan
import torch
import torch.nn.functional as F
from expectations import Expectation
from torch import Tensor, nn

import project

DTYPE = torch.bfloat16
TOLERANCE = 1e-2  # two roundings of bfloat16; wrong results differ by far more


@dataclass(frozen=True)
class Setup:
    key: str
    title: str
    call: Callable[[Tensor], Tensor]
    steps: tuple[plan.Step, ...]
    expectations: tuple[Expectation, ...]
    note: str = ""


@dataclass(frozen=True)
class Workload:
    """The same work in several set-ups; the others are compared with the first one, eager."""

    key: str
    title: str
    shape: dict[str, int]
    size: plan.Size
    x: Tensor
    of_other_shape: Tensor
    setups: tuple[Setup, ...]


def device() -> str:
    return "cuda" if torch.version.cuda is not None and torch.cuda.is_available() else "cpu"


def unit() -> str:
    return "GPU kernel" if device() == "cuda" else "computing op"


def linear(batch: int, in_dim: int, out_dim: int, compiled: bool) -> Workload:
    layer = nn.Linear(in_dim, out_dim, dtype=DTYPE, device=device())
    on_gpu = device() == "cuda"
    bias = (
        expect.without("aten::add", "aten::add_")  # its one kernel is the GEMM: the epilogue adds the bias
        if on_gpu
        else expect.beneath("aten::addmm", "aten::copy_", "the bias is laid down first, and the GEMM adds to it")
    )
    eager = Setup(
        "eager",
        "eager nn.Linear",
        layer,
        plan.LINEAR,
        (
            expect.launches(plan.LINEAR, unit()),
            bias,
            expect.launches_nothing("aten::t"),
            expect.dynamo(False),
        ),
    )
    setups = [eager]
    if compiled:
        expected = (
            expect.same_launches(),
            expect.without("aten::t"),  # views are resolved when the graph is compiled
            expect.dynamo(True),
            expect.compilations_on_new_shape(1),
            expect.agrees(TOLERANCE),
        )
        setups.append(Setup("compile", "compiled nn.Linear", _compiled(layer), plan.LINEAR, expected))
    return Workload(
        key="linear",
        title="One linear layer with bias",
        shape={"batch": batch, "in_dim": in_dim, "out_dim": out_dim},
        size=plan.linear_size(batch, in_dim, out_dim, DTYPE.itemsize),
        x=torch.randn(batch, in_dim, dtype=DTYPE, device=device()),
        of_other_shape=torch.randn(batch + 1, in_dim, dtype=DTYPE, device=device()),
        setups=tuple(setups),
    )


class GeGLU(nn.Module):
    """Gemma's MLP as in a model."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False, dtype=DTYPE, device=device())
        self.up_proj = nn.Linear(dim, hidden, bias=False, dtype=DTYPE, device=device())
        self.down_proj = nn.Linear(hidden, dim, bias=False, dtype=DTYPE, device=device())

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def mlp(batch: int, seq: int, dim: int, hidden: int, implementations: tuple[str, ...]) -> Workload:
    """The eager MLP and the named implementations of it; raises ValueError for one that cannot run here."""
    for name in implementations:
        if reason := unavailable(name):
            raise ValueError(f"{name} cannot run here: {reason}")
    model = GeGLU(dim, hidden)
    x = torch.randn(batch, seq, dim, dtype=DTYPE, device=device())
    makers = {"compile": _compiled_mlp, "liger": _liger, "ours": _ours, "ours-compile": _ours, "ours-triton": _ours}
    return Workload(
        key="mlp",
        title="The gated MLP, down(gelu(gate(x)) * up(x))",
        shape={"batch": batch, "seq": seq, "dim": dim, "hidden": hidden},
        size=plan.mlp_size(batch * seq, dim, hidden, DTYPE.itemsize),
        x=x,
        of_other_shape=torch.randn(batch + 1, seq, dim, dtype=DTYPE, device=device()),
        setups=(_eager_mlp(model), *(makers[name](model, name, x) for name in implementations)),
    )


IMPLEMENTATIONS = ("compile", "liger", "ours", "ours-compile", "ours-triton")


def unavailable(implementation: str) -> str | None:
    """The reason why an implementation cannot run on this machine, or None."""
    if implementation in ("liger", "ours-triton") and device() != "cuda":
        return "it needs a GPU and a torch with CUDA"
    if implementation == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    return None


def _eager_mlp(model: GeGLU) -> Setup:
    expected = (
        expect.launches(plan.EAGER, unit()),
        expect.launches_nothing("aten::t"),
        expect.dynamo(False),
        expect.compilations_on_new_shape(0),
    )
    return Setup("eager", "eager", model, plan.EAGER, expected)


def _compiled_mlp(model: GeGLU, key: str, x: Tensor) -> Setup:
    expected = (
        expect.launches(plan.POINTWISE_FUSED, unit()),
        expect.same_gemms(),
        expect.without("aten::gelu", "aten::mul", "aten::t"),
        expect.dynamo(True),
        expect.compilations_on_new_shape(1),
        expect.agrees(TOLERANCE),
    )
    return Setup(key, "torch.compile", _compiled(model), plan.POINTWISE_FUSED, expected)


def _liger(model: GeGLU, key: str, x: Tensor) -> Setup:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    def call(x: Tensor) -> Tensor:
        return model.down_proj(LigerGELUMulFunction.apply(model.gate_proj(x), model.up_proj(x)))

    expected = (
        expect.launches(plan.POINTWISE_FUSED, unit()),
        expect.same_gemms(),
        expect.without("aten::gelu", "aten::mul"),
        expect.dynamo(False),
        expect.compilations_on_new_shape(0),
        expect.agrees(TOLERANCE),
    )
    return Setup(key, "Liger", call, plan.POINTWISE_FUSED, expected)


def _ours(model: GeGLU, key: str, x: Tensor) -> Setup:
    fused_mlp = kernels.get_kernel(
        project.repo_id(), version=project.version(), backend=device(), trust_remote_code=True
    )
    weights = tuple(p.weight.detach() for p in (model.gate_proj, model.up_proj, model.down_proj))
    backend = "triton" if key == "ours-triton" else "auto"
    with fused_mlp.backend(backend):
        explanation = fused_mlp.explain(fused_mlp.gated_mlp, x, *weights)
    steps = plan.of_ours(explanation)
    compiled = key == "ours-compile"
    expected = [
        expect.launches(steps, unit()),
        expect.without("aten::gelu", "aten::mul"),
        expect.dynamo(compiled),
        expect.compilations_on_new_shape(1 if compiled else 0),
        expect.agrees(TOLERANCE),
    ]
    if any(part.implementation == "amx" for part in explanation.parts):
        expected.insert(1, expect.nothing_computes_beneath("_fused_mlp"))

    def forward(x: Tensor) -> Tensor:
        return fused_mlp.gated_mlp(x, *weights)

    function = _compiled(forward, fullgraph=True) if compiled else forward

    def call(x: Tensor) -> Tensor:
        with fused_mlp.backend(backend):
            return function(x)

    titles = {"ours": "fused-mlp", "ours-compile": "fused-mlp, compiled", "ours-triton": "fused-mlp, Triton"}
    return Setup(key, titles[key], call, steps, tuple(expected), note=str(explanation))


def _compiled(function: Callable[[Tensor], Tensor], **options) -> Callable[[Tensor], Tensor]:
    import torch._inductor.config as inductor

    inductor.cpp.enable_kernel_profile = True  # Inductor's C++ kernels appear in the trace
    return torch.compile(function, **options)
