"""LoRA: a gated MLP with adapters on its three projections, in training and inference, and whole steps of a model.

    python benchmarks/training/adapters.py                  all cases of this machine's list, in 9 minutes at most
    python benchmarks/training/adapters.py --quick          tiny sizes, few turns, no peers, to see that it runs
    python benchmarks/training/adapters.py --parts mlp --providers eager ours
    python benchmarks/training/adapters.py --from build/adapters.json  show the results of such a run; measure nothing

Base weights are frozen, in bfloat16. Adapters are in bfloat16, or in float32 under autocast, which is PEFT's default;
in cases with dropout they are in bfloat16. `eager` and `compile` run PEFT's formula, `unsloth` Unsloth's kernels if
they can be imported; `ours-base` is this package without the adapters. `gemms` are only the GEMMs of the base, gate and
up as one: four for a forward and a backward, two for a forward. A step is that of a Llama with PEFT adapters on all
linear layers, with AdamW; fresh instances of each variant run interleaved. The experts of a mixture have adapters on
both weights: as PEFT computes them, fused, and without any in `ours-base`. Times, "saved" and "peak" are defined as in
training.py; on a GPU, inference of MLPs runs in CUDA graphs. Writes <out>.json and <out>.svg, and prints a table.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import peft
import plots
import points
import torch
import training_models
import transformers
from adapters_providers import Adapters, GatedMLP
from points import DEVICE, ON_GPU, Clock, timed
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import measure

PARTS = ("mlp", "inference", "step", "experts", "experts in inference")
PROVIDERS = ("eager", "ours", "ours-recompute", "ours-base", "gemms", "unsloth", "compile")
WITHOUT = ("ours-base", "gemms")  # they have no adapters, so their results differ
PLAIN, WIDE = Adapters(), Adapters(torch.float32)
TRAINED = (PLAIN, WIDE, Adapters(dropout=0.05))
STEPS = (*TRAINED, Adapters(torch.float32, 0.05))


@dataclass(frozen=True)
class Sizes:
    """M, D, H and rank of the trained MLPs, and of the one in inference, for each M; the model's sizes and batch; D, H
    and rank of experts, their number and the number per token, and the numbers of tokens.
    """

    trained: tuple[tuple[int, int, int, int], ...]
    inference: tuple[tuple[int, int, int, int], ...]
    model: dict[str, int]
    batch: tuple[int, int]
    experts: tuple[int, int, int]
    mixture: tuple[int, int]
    tokens: tuple[int, ...]


def _model(width: int, hidden: int, layers: int, heads: int, vocabulary: int) -> dict[str, int]:
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": heads // 4}


SIZES = {
    "cuda": Sizes(
        ((4096, 4096, 14336, 16), (8192, 2048, 8192, 16), (2048, 4096, 14336, 64)),
        tuple((m, 4096, 14336, 16) for m in (1, 16, 4096)),
        _model(2048, 8192, layers=4, heads=32, vocabulary=32_000),
        (4, 1024),
        (2048, 768, 16),
        (128, 8),
        (1, 16, 128, 4096),
    ),
    "cpu": Sizes(
        ((128, 768, 3072, 16), (1024, 768, 3072, 16)),
        tuple((m, 768, 3072, 16) for m in (1, 16, 256)),
        _model(512, 1408, layers=2, heads=8, vocabulary=512),
        (1, 128),
        (1024, 512, 16),
        (64, 4),
        (1, 64),
    ),
    "quick": Sizes(
        ((48, 64, 96, 8),),
        ((3, 64, 96, 8),),
        _model(64, 96, layers=1, heads=4, vocabulary=64),
        (1, 16),
        (64, 48, 4),
        (4, 2),
        (3,),
    ),
}


def of_mlp(shape: tuple, adapters: Adapters, backward: bool, fused_mlp, clock: Clock, given) -> dict:
    """Figures of all providers; in training with the gradients of x and of the adapters."""
    mlp = GatedMLP(shape, adapters, fused_mlp)
    leaves = mlp.leaves if backward else []
    for leaf in leaves:
        leaf.requires_grad_()

    def inside(forward: Callable[[Tensor], Tensor]) -> Tensor:
        with adapters.context(), torch.set_grad_enabled(backward):
            return forward(mlp.x)

    def step(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = inside(forward)
        if backward:
            out.backward(mlp.grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    calls, memory, left, forwards = {}, {}, {}, mlp.forwards()
    expected = [tensor.clone() for tensor in step(forwards["eager"])]
    for name in given.providers:
        reason = clock.refusal()
        if reason is None and name == "ours-recompute" and not backward:
            continue
        try:
            if reason is None and name == "gemms":
                calls[name] = mlp.gemms(backward)
            elif reason is None:
                found = step(forwards[name])
                is_compared = name not in WITHOUT and not adapters.dropout  # each provider draws its own mask
                if is_compared and not all(map(points.alike, found, expected)):
                    raise RuntimeError("its results are not eager's")
                del found
                if backward:
                    forward = partial(inside, forwards[name])
                    memory[name] = measure.saved_and_peak(forward, lambda out: out.backward(mlp.grad))
                calls[name] = partial(step, forwards[name])
        except Exception as error:  # a provider that does not run here is left out, with the error as reason
            reason = points.words(error)
        if reason is not None:
            left[name] = reason
    if ON_GPU and not backward:
        figures = measure.compare_in_graphs(calls, given.rounds, given.seconds * 1e6)
    else:
        figures = timed(calls, clock, given)
    return {"providers": points.with_memory(figures, memory), "left": left}


def of_experts(sizes: Sizes, tokens: int, backward: bool, fused_mlp, clock: Clock, given) -> dict:
    """Figures of a layer's experts, with the gradients of x, of the routing weights and of the adapters."""
    (width, hidden, rank), (experts, top_k) = sizes.experts, sizes.mixture
    options = {"hidden_size": width, "moe_intermediate_size": hidden, "num_experts": experts}
    config = transformers.Qwen3MoeConfig(**options, num_experts_per_tok=top_k)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = nn.ModuleDict({"experts": Qwen3MoeExperts(config)}).bfloat16()
        x, weights = torch.randn(tokens, width).bfloat16(), torch.rand(tokens, top_k)
        index = torch.rand(tokens, experts).topk(top_k).indices
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    targets = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    adapted = peft.LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights=False, **targets)
    layer = peft.inject_adapter_in_model(adapted, layer).bfloat16().train(backward)
    modules = {"eager": layer, "ours": copy.deepcopy(layer)}
    report = str(fused_mlp.fuse_mlps(modules["ours"])).splitlines()[0]
    base = layer["experts"].get_base_layer()
    frozen = [parameter.detach() for parameter in (base.gate_up_proj, base.down_proj)]
    forwards = {name: (module["experts"], list(module.parameters())) for name, module in modules.items()}
    forwards["ours-base"] = (lambda *routed: fused_mlp.experts_mlp(*routed, *frozen)), []
    grad = torch.randn_like(x)
    calls, memory = {}, {}
    for name in given.providers:
        if name not in forwards:
            continue
        function, parameters = forwards[name]
        leaves = [each.detach().requires_grad_(backward) for each in (x, weights)]
        trained = [*leaves, *(parameter for parameter in parameters if parameter.requires_grad)]

        def forward(function=function, leaves=leaves) -> Tensor:
            with torch.set_grad_enabled(backward):
                return function(leaves[0], index, leaves[1])

        def back(out: Tensor, trained=trained) -> None:
            torch.autograd.grad(out, trained, grad)

        if backward:
            memory[name] = measure.saved_and_peak(forward, back)
        calls[name] = partial(lambda forward, back: back(forward()), forward, back) if backward else forward
    return {"providers": points.with_memory(timed(calls, clock, given), memory), "reports": {"ours": report}}


def of_step(sizes: Sizes, adapters: Adapters, fused_mlp, clock: Clock, given) -> dict:
    """Figures of a Llama's training step, fused and not."""
    reports = {}

    def build() -> nn.Module:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes.model, use_cache=False))

    def make(variant: str) -> training_models.Step:
        model = training_models.built(build, torch.bfloat16)
        options = {"r": 16, "lora_alpha": 32, "lora_dropout": adapters.dropout, "target_modules": "all-linear"}
        config = peft.LoraConfig(**options, init_lora_weights=False)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=adapters.dtype is torch.float32).train()
        if variant == "ours":
            reports[variant] = str(fused_mlp.fuse_mlps(model)).splitlines()[0]
        return training_models.Step(model, *sizes.batch, adapters.autocast)

    take_turns = partial(timed, clock=clock, given=given)
    return {**training_models.of_variants(make, ("eager", "ours"), given.copies, take_turns), "reports": reports}


def run(given) -> dict:
    fused_mlp, sizes = points.package(), SIZES["quick" if given.quick else DEVICE]
    versions = {library.__name__: library.__version__ for library in (peft, transformers)}
    found = {"machine": {**measure.machine(), **versions}, "results": []}
    todo = [("mlp", shape, adapters) for shape in sizes.trained for adapters in TRAINED]
    todo += [("inference", shape, PLAIN) for shape in sizes.inference]
    todo += [("step", sizes.batch, adapters) for adapters in STEPS]
    shapes = {tokens: (tokens, *sizes.experts) for tokens in sizes.tokens}
    todo += [("experts", shapes[max(shapes)], PLAIN)]
    todo += [("experts in inference", shape, PLAIN) for shape in shapes.values()]
    todo = [point for point in todo if point[0] in given.parts]
    clock = Clock(given.minutes, len(todo))

    def figures(part: str, shape: tuple, adapters: Adapters) -> dict:
        if part == "step":
            return of_step(sizes, adapters, fused_mlp, clock, given)
        if part.startswith("experts"):
            return of_experts(sizes, shape[0], part == "experts", fused_mlp, clock, given)
        return of_mlp(shape, adapters, part == "mlp", fused_mlp, clock, given)

    def label(part: str, shape: tuple, adapters: Adapters) -> dict:
        return {"part": part, "shape": shape, "adapters": str(adapters)}

    return points.collect(found, todo, label, figures, clock, given.out)


def main() -> None:
    parser = points.parser(__doc__, "adapters", rounds=None, seconds=None, minutes=9.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, help="of the MLP")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--copies", type=int, default=2, help="fresh instances of a model's variants")
    given = parser.parse_args()
    given.rounds = given.rounds or (2 if given.quick else 5)
    given.seconds = given.seconds or (0.01 if given.quick else 0.1)
    given.providers = given.providers or PROVIDERS[: -2 if given.quick else None]
    transformers.utils.logging.set_verbosity_error()
    found = points.found_by(run, given)
    points.print_table(found, "LoRA", plots.case_of)
    plots.adapters(found["results"], points.where(found), given.out)


if __name__ == "__main__":
    main()
