"""Llama 4's mixture, whose class passes every token to every expert, multiplied by zero where it was not chosen.

Without biases, an expert maps zero to zero and gives it no gradient, so only the chosen experts are computed: each gets
its own copy of the token, multiplied by its score, and its output is added to the shared expert's. The classes are
identified by their source, like those of ``parts/adapters.py``; unknown ones run as written.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from .... import calls
from ....autograd import training
from ....backends import native
from ....experts import Form
from ....operands import PLAIN_TENSORS
from ...methods import switching
from ...parts import refusals
from ...proving.evaluation import Evaluation
from ...proving.mixtures import activation_of
from ...proving.values import NotProved, Proof, Proofs
from ...reading import digests
from ...reading.attributes import are_unchanged, class_of, finder_of, name_of_class, of_call
from ...running import shortcut
from .. import mixtures

_NAME = "transformers.models.llama4.modeling_llama4.Llama4TextMoe"
_ROUTER, _EXPERTS = "router", "experts"
_WEIGHTS = ("gate_up_proj", "down_proj")
# Hashes of the source of the forwards of block, router and experts, each with the version of transformers that has it.
_DIGESTS = {"0065276034df72c8": "5.22"}


class _Known(NamedTuple):
    form: Form
    attributes: Tuple[Tuple[Any, str, Any], ...]  # values that were looked up in the classes


def is_mixture(module: nn.Module) -> bool:
    """True if a module is such a block, in any state, with a known activation."""
    return _proof_of(module) is not None


def within(module: nn.Module) -> Tuple[nn.Module, ...]:
    """Return the experts of a block, which reports their outcome; if it runs as written, they run their own method."""
    return (module._modules[_EXPERTS],) if is_mixture(module) else ()


def fused_methods(module: nn.Module) -> Dict[str, FunctionType]:
    """Return the method to install in a block; empty for anything else."""
    return {"forward": switching.fused_forward(KIND, class_of(module).forward, _output)} if is_mixture(module) else {}


KIND = "mixture of Llama 4"
_proofs = Proofs()


def refusal(module: nn.Module) -> Optional[str]:
    """Return the reason why a block runs its original forward in its present state; None if it is fused."""
    found = _read(module)
    return found if isinstance(found, str) else None


def digest(module: nn.Module) -> Optional[str]:
    """Return a hash of the source that a call of a block runs, except for its shared expert and activation."""
    parts = (module, *(module._modules.get(name) for name in (_ROUTER, _EXPERTS)))
    if any(part is None for part in parts):
        return None
    return digests.digest(code for part in parts for code in digests.codes_of(class_of(part), ("forward",)))


def _output(module: nn.Module, x: Any) -> Optional[Tuple[Tensor, Tensor]]:
    # The cheapest check comes first: small calls run as written.
    known = _read(module) if _pays(module, x) else None
    if not isinstance(known, _Known) or not _takes(module, x):
        return None
    rows = x.reshape(-1, x.shape[-1])
    scores, logits = module.router(rows)
    index = torch.topk(logits, module.router.top_k, dim=1).indices
    compute = functools.partial(_routed, module, known.form, index)
    if not shortcut.is_grad_enabled() and shortcut.is_as_recorded(module, rows):
        routed = training.as_recorded(lambda given: compute(given, scores), rows)
    else:
        routed = compute(rows, scores)
    return module.shared_expert(rows).add_(routed), logits


def _routed(module: nn.Module, form: Form, index: Tensor, rows: Tensor, scores: Tensor) -> Tensor:
    """Return the sum that the chosen experts add to every token: each gets its own row, multiplied by its score."""
    tokens, top_k = index.shape
    of_slots = (rows.unsqueeze(1) * scores.gather(1, index).unsqueeze(-1)).reshape(tokens * top_k, -1)
    weights = (getattr(module._modules[_EXPERTS], name) for name in _WEIGHTS)
    ones = rows.new_ones((tokens * top_k, 1))
    results = calls.experts_mlp(of_slots, index.reshape(-1, 1), ones, *weights, None, None, form)
    return results if top_k == 1 else results.view(tokens, top_k, -1).sum(1)


def _takes(module: nn.Module, x: Tensor) -> bool:
    """True if experts can be called on the input of a block."""
    up = module._modules[_EXPERTS].gate_up_proj
    if x.dtype != up.dtype or x.device != up.device:
        return False
    return (x.is_cpu or x.is_cuda) and not calls.autocasts(x) and calls.ambient_reason() is None


def _pays(module: nn.Module, x: Any) -> bool:
    """True if the chosen experts take less time than all of them, as measured on an H200 and on a CPU.

    The caller checks afterwards whether the block is unchanged.

    With few tokens, reading the weights is the bottleneck. Products in training read the chosen experts' weights at a
    smaller part of the bandwidth than one product of all experts does, until that product's arithmetic is the
    bottleneck. On other GPUs each expert is a separate product, which has to gain more; on a CPU, autograd's recording
    has a cost.
    """
    up, top_k = module._modules[_EXPERTS]._parameters.get(_WEIGHTS[0]), module._modules[_ROUTER].__dict__.get("top_k")
    if type(x) not in PLAIN_TENSORS or x.numel() == 0 or type(top_k) is not int or up is None or up.dim() != 3:
        return False
    tokens, experts = x.numel() // x.shape[-1], up.shape[0]
    if not x.is_cpu and not (native.DEVICE_TYPE == "cuda" and native.is_hopper(x) and x.dtype == torch.bfloat16):
        return tokens >= _MANY_ELSEWHERE
    recorded = module.training or (
        shortcut.is_grad_enabled() and (x.is_cpu or calls.autograd_follows(x, *module.parameters()))
    )
    read = 1.0 - (1.0 - 1.0 / experts) ** (tokens * top_k)  # the expected fraction of experts that are chosen
    if not x.is_cpu:
        return not recorded or tokens >= _MANY or read <= _MOST_READ
    left_out = (experts - top_k) * tokens * 3 * (up.shape[1] * up.shape[2] // 2)
    if left_out < _LEAST_LEFT_OUT[x.dtype == torch.float32, recorded]:
        return False
    return x.dtype == torch.float32 or tokens >= _MANY_ON_CPU or read <= _MOST_READ


_MANY, _MANY_ELSEWHERE, _MANY_ON_CPU = 192, 1024, 64  # tokens
_MOST_READ = 0.4
# Least number of multiplications saved, by (is float32, is recorded by autograd).
_LEAST_LEFT_OUT = {(True, False): 1 << 21, (True, True): 1 << 26, (False, False): 1 << 21, (False, True): 1 << 29}


def _read(module: nn.Module) -> Union[str, _Known]:
    """Return the computation of a block; or a noun phrase for why it runs as written."""
    known = _proof_of(module)
    if known is None or not are_unchanged(known.attributes):
        return "a patched class"
    around = refusals.of_global_state()
    if around is not None:
        return around
    router, experts = (module._modules[name] for name in (_ROUTER, _EXPERTS))
    for part, name in ((router, _ROUTER), (experts, _EXPERTS)):
        effect = of_call(part)
        if effect is not None:
            return f"{name} with {effect}"
    if "parametrizations" in experts._modules or "parametrizations" in router._modules:
        return "an unsupported weight"
    up, down = (experts._parameters[name] for name in _WEIGHTS)
    number, top_k = up.shape[0], router.__dict__.get("top_k")
    if down.shape[0] != number or router.weight.shape[0] != number or type(top_k) is not int or not 0 < top_k <= number:
        return f"{top_k} of {number} experts"
    return mixtures.refusal_of_weights((up, down)) or known


def _proof_of(module: nn.Module) -> Optional[_Known]:
    if finder_of(type(module)) is not None:  # reading it would run code of the class
        return None
    kind = class_of(module)
    if name_of_class(kind) != _NAME:
        return None
    experts = module._modules.get(_EXPERTS)
    if experts is None or any(experts._parameters.get(name) is None for name in _WEIGHTS):
        return None
    key = kind, *(class_of(module._modules.get(name)) for name in (_ROUTER, _EXPERTS))
    return _proofs.get(key, experts, lambda: _proved(module, experts, key)).found


def _proved(module: nn.Module, experts: nn.Module, kinds: Tuple[type, ...]) -> Proof:
    evaluation = Evaluation(experts)
    if digest(module) not in _DIGESTS:
        return Proof(None, ())
    try:
        form = activation_of(evaluation, "act_fn")._replace(gated=True, transposed=True)
    except NotProved:
        return Proof(None, evaluation.dependencies)
    attributes = tuple((kind, name, getattr(kind, name)) for kind in kinds for name in ("forward", "__call__"))
    return Proof(_Known(form, attributes), evaluation.dependencies)
