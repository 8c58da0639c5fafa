"""One call that fuses the MLPs of an existing model.

An MLP is recognised by the code of a module, not by the names of its parts. The methods are parsed and regenerated for
the instance, with fused calls where the output of a projection goes through an activation. All other code stays as
written, so a module is never mistaken for something else. Weights stay in place; ``FusionReport.restore`` restores the
original methods.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ..autograd import training
from ..operands import check_flags
from . import outcome, verification
from .attention import methods as attention
from .experts import blocks, mixtures, routers, wrappers
from .experts.known import llama4
from .methods import switching
from .outcome import Outcome, Reason
from .parts import adapters
from .reading.attributes import FUSED, children_of, finder_of, method_in, modules_of, state_of, written
from .report import FusionReport, of_module
from .rewriting import detection, endings, rewriter
from .running import adapted, normed, shortcut


def fuse_mlps(model: nn.Module, *, verify: bool = True, memory: str = training.KEPT) -> FusionReport:
    """Replace the MLPs in the methods of ``model``'s modules by fused calls, in place.

    This also fuses modules that end an encoder's attention, ``norm(projection(x) + residual)``; RMSNorms whose class
    spells them out in several operations; and, in attentions, the projections of one input and the rotary embedding.

    Each fused module holds its fused methods itself, bound to it; its class is unchanged. A module that cannot be
    parsed or fused is left unchanged, and the report says why. Modules that an earlier call fused are reported as
    fused. If the call raises or is interrupted, the model is restored to its previous state. Threads that fuse, restore
    or explain wait for each other.

    Args:
        model: any module. Its parameters, buffers and attributes are neither copied nor changed, and none of its
            methods runs.
        verify: before fusing, compare each kind of MLP with its parts, called one after the other (on a few random
            rows, with the module's own weights), and skip those that disagree. Nothing is compared if weights are on
            the meta device or must not be read.
        memory: what training saves, as in :func:`gated_mlp`. Modules that are already fused switch to it too.

    Returns:
        A report that prints as a table: what was fused, what was not, and why.

    Raises:
        TypeError: ``model`` is not a module, or ``verify`` not a bool.
        ValueError: ``memory`` is unknown.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    training.check_memory(memory)
    check_flags(verify=verify)
    report, check = FusionReport(), verification.Verification() if verify else None
    scripted = set()  # by id: modules inside a scripted one
    first_modules, second_modules = set(), set()  # by id: modules of split MLPs that are fused
    around: Dict[int, str] = {}  # by id: MLPs that are fused with their block
    inner = set()  # by id: layers of fused MLPs, and modules that adapters wrap
    with switching.lock:
        modules = list(modules_of(model))
        before = [(module, switching.saved(module)) for _, module in modules]
        try:
            for path, module in modules:
                if adapters.is_adapted(module):
                    inner.update(map(id, children_of(module).values()))
                if id(module) in scripted or (id(module) in inner and _is_read_with_others(module)):
                    continue
                if issubclass(type(module), torch.jit.ScriptModule):
                    scripted.update(id(inner) for _, inner in modules_of(module))
                found = _fuse(module, check, memory, id(module) in second_modules)
                first_modules.update(map(id, first_modules_in(module)))
                for method in switching.methods_in(module).values():
                    second_modules.update(map(id, rewriter.modules_in("second", method, module)))
                around.update(blocks_around(module))
                inner.update(map(id, (*layers_in(module), *wrappers.within(module))))
                if found is not None and id(module) not in first_modules:
                    report._of(found.pattern).append(
                        of_module(path, module, in_block(found, around.get(id(module), "")))
                    )
            for _, module in modules:
                if _is_idle(module):
                    switching.switch_back(module)
                if is_fused(module):
                    report._restoring.append(partial(_restore, weakref.ref(module)))
        except BaseException:
            for module, state in before:
                switching.put_back(module, state)
            raise
    return report


def is_fused(module: nn.Module) -> bool:
    """Return True if a module runs a method that :func:`fuse_mlps` installed; :func:`explain` says how far it is fused.

    Raises TypeError if ``module`` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    return bool(switching.methods_in(module))


def first_modules_in(module: nn.Module) -> List[nn.Module]:
    """Return the first modules of fused split MLPs, and the modules that a fused wrapper or block contains."""
    methods = switching.methods_in(module).values()
    found = [part for method in methods for part in rewriter.modules_in("first", method, module)]
    return [*found, *wrappers.within(module), *llama4.within(module)]


def layers_in(module: nn.Module) -> List[nn.Module]:
    """Return the projections of the MLPs that a module runs fused."""
    methods = filter(rewriter.is_fused, switching.methods_in(module).values())
    mlps = (mlp for method in methods for mlp in rewriter.mlps_in(method, module))
    return [part for mlp in mlps for part in mlp.projections.values()]


def _is_read_with_others(module: nn.Module) -> bool:
    """True for a linear layer or experts wrapper that gets no method of its own inside a fused module."""
    return adapters.is_known(module) or wrappers.is_wrapper(module) or adapted.is_padded(module)


def blocks_around(module: nn.Module) -> Dict[int, str]:
    """Return the MLPs, by id, that a module's methods compute as part of a block, with a description of the rest."""
    found: Dict[int, str] = {}
    for method in switching.methods_in(module).values():
        found.update({id(part): words for part, words in rewriter.mlps_around(method, module)})
    return found


def in_block(found: Outcome, words: str) -> Outcome:
    """Return the outcome of an MLP that is fused with its block."""
    is_whole = found.extent == outcome.FULL and not adapters.is_said_in(found.pattern)
    return replace(found, pattern=found.pattern + words) if is_whole else found


def _is_idle(module: nn.Module) -> bool:
    """True if a module's fused methods only compute blocks around MLPs, and none of these MLPs is fused."""
    methods = switching.methods_in(module).values()
    if not methods or not all(map(rewriter.is_fused, methods)):
        return False
    around = [part for method in methods for part, _ in rewriter.mlps_around(method, module)]
    has_own = any(rewriter.mlps_in(method, module) for method in methods)
    return bool(around) and not has_own and not any(map(is_fused, around))


def outcome_of(module: nn.Module) -> Optional[Outcome]:
    """Return how far a module is fused at present, and why no further; None if it is not an MLP."""
    with switching.lock:
        return _outcome_of(module)


def _outcome_of(module: nn.Module) -> Optional[Outcome]:
    methods = switching.methods_in(module)
    if methods:
        return outcome.of_methods(module, methods.values())
    if mixtures.is_registered(module):
        return outcome.of_experts(module)
    methods, found = _plan(module, None, training.KEPT)
    return outcome.left(module, methods.values(), _not_fused(module, *methods)) if methods else found


def _not_fused(module: nn.Module, name: str, *_: str) -> Reason:
    state = state_of(module)
    if name not in state.get(FUSED, ()):
        return Reason(outcome.NOT_FUSED)
    return Reason(outcome.REPLACED, name, switching.origin_of(state.get(name, getattr(type(module), name, None))))


def _fuse(
    module: nn.Module, check: Optional[verification.Verification], memory: str, is_tail: bool
) -> Optional[Outcome]:
    """Fuse one module and return its outcome; None if it is not an MLP, or is the second module of a fused one."""
    methods = switching.methods_in(module)
    if methods and all(rewriter.memory_of(method) == memory for method in methods.values()):
        return outcome.of_methods(module, methods.values())
    switching.switch_back(module)  # it may hold fused methods that no longer run
    methods, found = _plan(module, check, memory, is_tail)
    if methods:
        switching.switch(module, methods)
    return found


def _plan(
    module: nn.Module, check: Optional[verification.Verification], memory: str, is_tail: bool = False
) -> Tuple[Dict[str, FunctionType], Optional[Outcome]]:
    """Return the methods to install in a module, if any, and how far they fuse it or why they do not.

    An error in one module must not keep the others from being fused.
    """
    try:
        return _plan_of(module, check, memory, is_tail)
    except Exception as error:
        return {}, Outcome(outcome.NONE, (outcome.of_error(error),))


def _plan_of(
    module: nn.Module, check: Optional[verification.Verification], memory: str, is_tail: bool
) -> Tuple[Dict[str, FunctionType], Optional[Outcome]]:
    if issubclass(type(module), torch.jit.ScriptModule):
        return {}, Outcome(outcome.NONE, (Reason(outcome.SCRIPTED),))
    finder = finder_of(type(module))
    if finder is not None:
        return {}, outcome.of_finder(module, finder)
    methods, unknown = mixtures.fused_methods(module) or routers.fused_methods(module), ()
    methods = methods or wrappers.fused_methods(module) or llama4.fused_methods(module) or blocks.fused_methods(module)
    methods = methods or adapted.fused_methods(module) or normed.fused_methods(module)
    if not methods:
        methods, unknown = rewriter.fused_methods(module, memory)
    if unknown and not methods:
        reasons = tuple(map(outcome.of_activation, unknown))
        return {}, Outcome(outcome.NONE, reasons) if detection.has_two_projections(module) else None
    if not methods and not is_tail:
        methods = endings.fused_methods(module, memory)
    if not methods:
        left = outcome.of_experts(module) if mixtures.are_left(module) else outcome.of_nothing(module)
        methods = {} if left is not None else attention.fused_methods(module, memory)
        if not methods:
            return {}, left
    nothing = outcome.of_nothing_to_fuse(module, methods.values())
    if nothing is not None:
        return {}, nothing
    if issubclass(type(module), torch.fx.GraphModule):
        return {}, outcome.left(module, methods.values(), Reason(outcome.GRAPH))
    for name, method in methods.items():
        place = switching.place_of(module, name)
        own = state_of(module).get(place)
        if own is not None and not _is_read(module, place, own, method):
            return {}, outcome.left(
                module, methods.values(), Reason(outcome.OWN_METHOD, name, switching.origin_of(own))
            )
        kind = switching.kind_of(method)
        if check is None or kind not in (None, mixtures.KIND):
            words = None
        elif kind == mixtures.KIND:
            words = check.disagreement_of_experts(module)
        else:
            words = check.disagreement(rewriter.mlps_in(method, module))
        if words is not None:
            return {}, outcome.left(module, methods.values(), Reason(outcome.DISAGREES, name, words))
    rewritten = filter(rewriter.is_fused, methods.values())
    for mlp in (mlp for method in rewritten for mlp in rewriter.mlps_in(method, module)):
        shortcut.learn(mlp.act)
        shortcut.learn_layers(mlp.projections.values())
    return rewriter.lean_methods(module, methods), outcome.of_methods(module, methods.values())


def _is_read(module: nn.Module, place: str, own: Any, method: FunctionType) -> bool:
    """True if what a module holds in place of a method is the function the fused one was generated from, or itself a
    fused method, possibly of the module that this one is a shallow copy of."""
    is_fused = type(own) is MethodType and type(own.__func__) is FunctionType and own.__func__ in written
    return is_fused or method_in(module, place) is written[method].function


def _restore(reference: weakref.ReferenceType[nn.Module]) -> None:
    module = reference()
    if module is not None:
        with switching.lock:
            switching.switch_back(module)
