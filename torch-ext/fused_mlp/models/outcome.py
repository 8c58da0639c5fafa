"""Records of how far the MLPs of a module are fused in its present state, and why no further."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import dispatch
from ..adapters import DROPS, Layer
from ..autograd import training
from ..backends import reference
from ..quantized import weights as quantized
from .attention import methods as attention
from .experts import blocks, mixtures, routers, wrappers
from .experts.known import llama4
from .methods import switching
from .parts import adapters, norms, recognition, refusals
from .reading.attributes import attribute_of, of_call
from .reading.source import tree_of
from .rewriting import detection, endings, rewriter
from .rewriting.found import FoundMLP, around_of
from .running import adapted, forwards, normed

# Extents: the part of an MLP that one kernel call computes.
FULL = "full"  # the GEMMs, with the activation in their epilogue
POINTWISE = "pointwise"  # the activation and the product of two tensors, if these are large
BIAS = "bias"  # a GEMM with bias, if there is no activation
ACTIVATION = "activation"  # the activation, if there is nothing else
PARTLY = "partly"  # the first layer with the activation; what follows is called
NONE = "none"

_EXTENT_WORDS = {  # used if there is no reason to give
    FULL: "GEMMs and activation",
    POINTWISE: "activation and product",
    BIAS: "GEMM and bias",
    ACTIVATION: "activation",
}

# Codes of reasons: why a part is called, or why a module is unchanged.
CALLED = "called"
UNKNOWN_ACTIVATION = "unknown activation"
ALTERED_ACTIVATION = "altered activation"
NOT_FUSED = "not fused"
REPLACED = "replaced"
OWN_METHOD = "own method"
OWN_FINDER = "own finder"
SCRIPTED = "scripted"
GRAPH = "graph"
NO_FUNCTION = "no function"
NO_SOURCE = "no source"
UNKNOWN_FORM = "unknown form"
OTHER_BRANCH = "other branch"
DISAGREES = "disagrees"
OWN_WAY = "own way"
NO_KERNEL = "no kernel"
FEW_ROWS = "few rows"
FEW_COMPILED_ROWS = "few compiled rows"
ERROR = "error"

_REASON_WORDS = {
    CALLED: "calls {part} ({detail})",
    UNKNOWN_ACTIVATION: "unknown activation {part}",
    ALTERED_ACTIVATION: "activation {part} has {detail}",
    NOT_FUSED: "not fused",
    REPLACED: "its fused {part} was replaced ({detail}); fuse again",
    OWN_METHOD: "its {part} is overridden on the instance ({detail})",
    OWN_FINDER: "its class defines {part}, which runs on attribute access",
    SCRIPTED: "compiled by TorchScript",
    GRAPH: "a torch.fx.GraphModule, which generates its own code",
    NO_FUNCTION: "its forward is a {detail}, not a function",
    NO_SOURCE: "source code not found",
    UNKNOWN_FORM: "code in an unrecognised form",
    OTHER_BRANCH: "takes another branch of its code ({detail})",
    DISAGREES: "{detail}",
    OWN_WAY: "runs unfused: {detail}",
    NO_KERNEL: "{detail}",
    FEW_ROWS: "fused in training with at least {detail} rows",
    FEW_COMPILED_ROWS: "fused in training under torch.compile with at least {detail} rows",
    ERROR: "cannot be fused: {detail}",
}


_ADVICE = {  # by a substring of the detail; the first match applies
    " around a ": "",
    "a peft.": "; merge the adapters and fuse again",
    "kernel for torch.float": "; cast the model to torch.bfloat16",
    "transformers.distributed.expert_parallel": '; load it with experts_implementation="fused_mlp"',
    "in autocast": "; cast the model instead of using autocast",
}


_LEAST_INPUTS = 8  # 16 bytes of 16-bit elements, the vectors in which kernels read rows


@dataclass(frozen=True)
class Reason:
    """A reason against fusion.

    ``code`` is one of the codes in this file. ``part`` names the subject: the path of a part, the class of an
    activation, or a method. ``detail`` describes its state. ``str`` gives the text.
    """

    code: str
    part: str = ""
    detail: str = ""

    def __str__(self) -> str:
        words = _REASON_WORDS[self.code].format(part=self.part, detail=self.detail)
        return words + next((advice for found, advice in _ADVICE.items() if found in self.detail), "")


@dataclass(frozen=True)
class Outcome:
    """How far a module is fused, why no further, and the patterns of its MLPs."""

    extent: str
    reasons: Tuple[Reason, ...] = ()
    pattern: str = ""


def of_methods(module: nn.Module, methods: Iterable[FunctionType]) -> Optional[Outcome]:
    """Return the outcome of the MLPs in a module's fused methods."""
    methods = list(methods)
    for kind in filter(None, map(switching.kind_of, methods)):
        return _OF_KIND[kind](module)
    for method in filter(attention.is_fused, methods):
        return of_attention(method, module)
    for method in filter(endings.is_fused, methods):
        return of_sum(endings.parts_of(method, module))
    mlps = [mlp for method in methods for mlp in rewriter.mlps_in(method, module)]
    if not mlps:  # the MLPs are separate modules with their own outcome
        return None
    running = [mlp for mlp in mlps if mlp.aside is None]
    if not running:
        reasons = (Reason(OTHER_BRANCH, "", aside) for aside in dict.fromkeys(mlp.aside for mlp in mlps))
        return Outcome(NONE, tuple(reasons), _pattern(mlps))
    reasons = tuple(dict.fromkeys(reason for mlp in running for reason in _reasons(mlp)))
    if not reasons:
        has_gemm = any(mlp.projections for mlp in running)
        return Outcome(FULL if has_gemm else POINTWISE, _notes(module, running, methods), _pattern(running))
    return Outcome(max(map(_part_fused, running), key=(NONE, POINTWISE, PARTLY).index), reasons, _pattern(running))


def _part_fused(mlp: FoundMLP) -> str:
    """Return the extent of an MLP that is not fused as a whole."""
    if mlp.activation is None or refusals.of_global_state() is not None or _without_kernel(mlp):
        return NONE
    first = list(mlp.projections.values())[: 2 if mlp.pattern.gated and not mlp.pattern.packed else 1]
    if mlp.pattern.whole and not any(map(adapters.of_state, first)):
        return PARTLY
    return POINTWISE if mlp.pattern.gated else NONE


def of_experts(module: nn.Module, asked: Optional[str] = None) -> Outcome:
    """Return the outcome of experts: full if the forward, which checks at each call, calls ``experts_mlp``."""
    refusal = mixtures.refusal(module, asked, around=True)
    if refusal is not None:
        return _own_way(refusal, _EXPERTS)
    pattern = _UNTRAINED_EXPERTS if mixtures.trains_as_written(module) else _EXPERTS
    return Outcome(FULL, (), f"{pattern}{mixtures.words_of(module)}")


def of_wrapper(module: nn.Module) -> Outcome:
    """Return the outcome of experts whose weights are wrapped by adapters."""
    refusal, rank = wrappers.refusal(module), wrappers.rank_of(module)
    return _own_way(refusal, f"{_EXPERTS} with LoRA of rank {rank}" if rank else _EXPERTS)


def of_adapted(module: nn.Module) -> Optional[Outcome]:
    """Return the outcome of a single layer: one with an adapter, a quantised weight, or widths that are padded."""
    refusal, pattern = adapted.refusal(module), f"{forwards.LINEAR}{adapters.words_of((module,))}"
    if adapted.is_padded(module):
        return Outcome(FULL, (), _PADDED) if refusal is None else None
    return _own_way(refusal, pattern)


def of_norm(module: nn.Module) -> Outcome:
    """Return the outcome of a standalone norm."""
    return _own_way(normed.refusal(module), normed.name_of(module))


def _own_way(refusal: Optional[str], pattern: str) -> Outcome:
    """Return the outcome of a module that is one call, or that runs as written for the given reason."""
    return Outcome(FULL, (), pattern) if refusal is None else Outcome(NONE, (Reason(OWN_WAY, "", refusal),), pattern)


# Methods that are not generated from source. Routers and blocks of mixtures are not MLPs: if they run as written, they
# are not reported, and the parts of a block are reported instead.
_OF_KIND: Dict[str, Callable[[nn.Module], Optional[Outcome]]] = {
    mixtures.KIND: of_experts,
    wrappers.KIND: of_wrapper,
    llama4.KIND: lambda module: _own_way(llama4.refusal(module), _EXPERTS),
    routers.KIND: lambda module: None if routers.refusal(module) is not None else Outcome(FULL, (), _ROUTER),
    blocks.KIND: lambda module: None if blocks.refusal(module) is not None else Outcome(FULL, (), _MIXTURE),
    adapted.KIND: of_adapted,
    normed.KIND: of_norm,
}
_OF_EXPERTS = (mixtures.KIND, wrappers.KIND, llama4.KIND)


def of_attention(method: FunctionType, module: nn.Module) -> Optional[Outcome]:
    """Return the outcome of an attention's projections of one input and its rotary embedding; None if neither is
    computed in the module's present mode."""
    reasons, pattern = called(attention.refusals_of(method, module)), attention.pattern_of(method, module)
    return Outcome(NONE if reasons else FULL, reasons, pattern) if pattern else None


def is_attention(pattern: str) -> bool:
    """True for the pattern of a fused part of an attention."""
    return pattern.startswith((attention.PROJECTIONS, attention.ROTARY))


def is_beside(pattern: str) -> bool:
    """True for the patterns of norms and attentions, which are reported next to MLPs and similar modules."""
    return pattern in NORMS or is_attention(pattern)


_PADDED = "linear, padded"
_EXPERTS, _UNTRAINED_EXPERTS, _ROUTER = "experts", "experts in inference", "router"
_MIXTURE = "router and experts in inference"


def is_mlp(pattern: str) -> bool:
    """True for the pattern of a whole MLP or of experts."""
    return pattern.startswith(_MLPS) and not pattern.startswith("gated linear")


NORMS = ("LayerNorm", "RMSNorm")
_MLPS = ("plain", "gated", "packed gated", "experts")
AROUND, NORMED = around_of(True, False), around_of(True, True)


def words_of(extent: str, pattern: str) -> str:
    """Describe what one call computes in a module with this pattern, at this extent."""
    if pattern in NORMS:
        return "norm"
    if is_attention(pattern):
        return pattern
    return "GEMM, sum and norm" if pattern == _SUM else _EXTENT_WORDS[extent]


def left(module: nn.Module, methods: Iterable[FunctionType], reason: Reason) -> Optional[Outcome]:
    """Return the outcome of a module that was not changed although these methods could be generated for it."""
    methods = list(methods)
    kinds = set(map(switching.kind_of, methods)) - {None}
    if kinds.intersection(_OF_EXPERTS):
        return Outcome(NONE, (reason,), _EXPERTS)
    if kinds or any(endings.is_fused(method) or attention.is_fused(method) for method in methods):
        return None
    mlps = [mlp for method in methods for mlp in rewriter.mlps_in(method, module)]
    return Outcome(NONE, (reason,), _pattern(mlps)) if mlps else None  # otherwise the MLPs are separate modules


def of_nothing_to_fuse(module: nn.Module, methods: Iterable[FunctionType]) -> Optional[Outcome]:
    """Return the outcome of methods that can never fuse anything; None if they may fuse something."""
    mlps = [mlp for method in methods if rewriter.is_fused(method) for mlp in rewriter.mlps_in(method, module)]
    firsts = [next(iter(mlp.projections.values()), None) for mlp in mlps]
    plain = not any(mlp.pattern.gated for mlp in mlps)
    if not (mlps and plain):
        return None
    if all(map(_has_few_inputs, firsts)):
        reason = Reason(NO_KERNEL, "", f"no kernel for {firsts[0].in_features} input features")
        return Outcome(NONE, (reason,), _pattern(mlps))
    if not all(map(_has_own_product, firsts)):
        return None
    return Outcome(NONE, tuple(dict.fromkeys(reason for mlp in mlps for reason in _reasons(mlp))), _pattern(mlps))


def _has_few_inputs(projection: Any) -> bool:
    """True for a layer of coordinates or similar: PyTorch runs its GEMM in any case, so fusing gains nothing."""
    return type(projection) is nn.Linear and projection.in_features < _LEAST_INPUTS


def _has_own_product(projection: Any) -> bool:
    return refusals.has_own_product(projection) and not adapters.is_known(projection)


def of_parts(projections: Dict[str, nn.Module]) -> Outcome:
    """Return the outcome of an MLP with these projections and a known activation; ``pattern`` describes adapters."""
    around = refusals.of_global_state()
    reasons = called({name: around or adapters.of_state(part) for name, part in projections.items()})
    return Outcome(NONE if reasons else FULL, reasons, adapters.words_of(projections.values()))


def of_sum(parts: Dict[str, nn.Module]) -> Outcome:
    """Return the outcome of a layer followed by a residual sum and a norm: full if one call computes them.

    The layer is the first of the parts and the norm the last. The parts between them must be inactive, except for a
    dropout that an op supports in training.
    """
    (projection, layer), *behind, (last, norm) = parts.items()
    unknown = None if type(norm) in norms.known else f"a {type(norm).__name__}"
    found = {projection: refusals.of_projection(layer)}
    found.update({name: _before_sum(part) for name, part in behind})
    found[last] = unknown or of_call(norm)
    around = refusals.of_global_state()
    reasons = called(found if around is None else dict.fromkeys(found, around))
    if reasons:
        return Outcome(NONE, reasons, _SUM)
    weight = attribute_of(norm, norms.known[type(norm)].weight)
    if not (DROPS and norm.training and isinstance(weight, Tensor) and weight.requires_grad):
        return Outcome(FULL, (), _SUM)
    rows = -(-dispatch.LEAST_SUM.get(weight.dtype, 0) // max(weight.numel(), 1))
    return Outcome(FULL, (Reason(FEW_ROWS, "", f"{rows:,}"),) if rows > 1 else (), _SUM)


def _before_sum(part: nn.Module) -> Optional[str]:
    reason = forwards.alteration(part)
    return of_call(part) if reason == forwards.ACTIVE and DROPS and part.p < 1.0 else reason


_SUM = f"{forwards.LINEAR} with residual and norm"


def of_error(error: Exception) -> Reason:
    """Return the reason for an unforeseen error in one module."""
    return Reason(ERROR, "", f"{type(error).__name__}: {error}".splitlines()[0])


def called(refusal_of: Dict[str, Optional[str]]) -> Tuple[Reason, ...]:
    """Return the reasons for parts that are called because of a refusal; parts with the same refusal share one."""
    names: Dict[str, List[str]] = {}
    for name, refusal in refusal_of.items():
        if refusal is not None:
            names.setdefault(refusal, []).append(name)
    return tuple(Reason(CALLED, ", ".join(alike), refusal) for refusal, alike in names.items())


def of_activation(function: object) -> Reason:
    """Return the reason for a function that is not in the table of activations."""
    name, alteration = recognition.name_of(function), recognition.alteration_of(function)
    return Reason(UNKNOWN_ACTIVATION, name) if alteration is None else Reason(ALTERED_ACTIVATION, name, alteration)


def of_finder(module: nn.Module, name: str) -> Optional[Outcome]:
    """Return the outcome of a module skipped because its class has this method; None if it cannot be an MLP."""
    is_mlp = detection.has_parts_of_mlp(module) and detection.applies_activation_to_projection(module)
    return Outcome(NONE, (Reason(OWN_FINDER, name),)) if is_mlp else None


def of_nothing(module: nn.Module) -> Optional[Outcome]:
    """Return the outcome of a module that is an MLP without a match; None if it is not an MLP."""
    if issubclass(type(module), (nn.ModuleList, nn.ModuleDict)) or not detection.has_parts_of_mlp(module):
        return None
    forward = inspect.getattr_static(type(module), "forward")
    if isinstance(forward, FunctionType):
        forward = inspect.unwrap(forward)  # a decorator calls the function that it wraps
    if not isinstance(forward, FunctionType):
        return Outcome(NONE, (Reason(NO_FUNCTION, "", type(forward).__name__),))
    if tree_of(forward) is None:
        return Outcome(NONE, (Reason(NO_SOURCE),))
    return Outcome(NONE, (Reason(UNKNOWN_FORM),)) if detection.applies_activation_to_projection(module) else None


def _reasons(mlp: FoundMLP) -> List[Reason]:
    """Return the reasons why one MLP is not fused further."""
    around = refusals.of_global_state()
    if around is not None:
        return [Reason(CALLED, "all parts", around)]
    if any(mlp.split.values()):  # their parts are not examined then
        return list(called(mlp.split))
    found = {name: adapters.of_state(part) for name, part in mlp.projections.items()}
    projections = list(mlp.projections.values()) or [None]
    given = forwards.dtype_of(projections[0]), projections[-1]
    found.update({name: forwards.alteration(part, *given) for name, part in mlp.between.items()})
    unknown = [] if mlp.activation is not None else [of_activation(mlp.act)]
    return [*called(found), *unknown] or _without_kernel(mlp)


def _without_kernel(mlp: FoundMLP) -> List[Reason]:
    """Return the reason why no kernel computes an MLP on its device and in its dtype; empty if one does."""
    weight, forced = _weight(mlp), dispatch._open_blocks[-1].name
    if weight is None or weight.is_meta or forced not in ("auto", "torch"):  # a forced backend may refuse by raising
        return []
    if dispatch.select(mlp.pattern.op, weight) is not reference:
        return []
    return [Reason(NO_KERNEL, "", dispatch.reasoned(mlp.pattern.op, weight)[1])]


def _notes(module: nn.Module, mlps: Iterable[FoundMLP], methods: Iterable[FunctionType]) -> Tuple[Reason, ...]:
    """Return the numbers of rows from which a module in training runs fused, eager and compiled, if bounds exist."""
    memory = next(map(rewriter.memory_of, filter(rewriter.is_fused, methods)), training.KEPT)
    found = [(mlp, mlp.pattern, _weight(mlp)) for mlp in mlps if module.training]
    trained = [each for each in found if each[2] is not None and each[2].requires_grad]
    frozen = [adapters.layer_of(part) for mlp, *_ in found for part in mlp.projections.values()]
    least = {
        FEW_ROWS: [
            training.least_rows(
                pattern.op, pattern.gated, mlp.activation.code, weight, memory, _has_many_operations(mlp)
            )
            for mlp, pattern, weight in trained
        ]
        + [each.least_trained or 0 for each in frozen if isinstance(each, Layer) and each.adapter is None],
        FEW_COMPILED_ROWS: [training.least_compiled_rows(of.op, weight, memory) for _, of, weight in trained],
    }
    most = {code: max(rows, default=1) for code, rows in least.items()}
    return tuple(Reason(code, "", f"{rows:,}") for code, rows in most.items() if rows > 1)


def _has_many_operations(mlp: FoundMLP) -> bool:
    """True if the op includes an activation of several operations, or the norm after an MLP of two modules."""
    return recognition.is_composite(mlp.act) or (bool(mlp.split) and mlp.around == NORMED)


def _weight(mlp: FoundMLP) -> Optional[Tensor]:
    first = next(iter(mlp.projections.values()), None)
    layer = None if first is None else adapters.layer_of(first)
    if isinstance(layer, Layer) and quantized.is_any(layer.weight):  # its stand-in has the dtype of the GEMM
        return quantized.shape_alone(layer.weight, layer.dtype or torch.bfloat16)
    weight = None if first is None else attribute_of(first, "weight")
    return weight if isinstance(weight, Tensor) and not is_lazy(weight) and weight.dim() == 2 else None


def _pattern(mlps: Iterable[FoundMLP]) -> str:
    words = (f"{mlp.pattern}{' in two modules' if mlp.split else ''}{_of_adapters(mlp) or mlp.around}" for mlp in mlps)
    return ", ".join(dict.fromkeys(words))


def _of_adapters(mlp: FoundMLP) -> str:
    return adapters.words_of(mlp.projections.values())
