"""Experts of mixtures: experts_mlp against transformers' implementations (eager, grouped_mm, batched_mm) and Liger.

    python benchmarks/experts/experts.py                      every shape of this machine's list, in 4 minutes at most
    python benchmarks/experts/experts.py --also liger         Liger too, which tunes itself at its first call of a shape
    python benchmarks/experts/experts.py --shapes Mixtral-8x7B --tokens 1 64 --routing zipf
    python benchmarks/experts/experts.py --from build/experts.json  show the results of such a run; measure nothing

All providers use the same weights and routing and run interleaved in one process; figures are medians. There are two
routings: balanced, where all experts are equally likely, and Zipf, where the expert of rank r is chosen in proportion
to 1 / r. On a GPU, Liger and `eager`, a loop over the experts on the host, run only on request: Liger autotunes for
more than a minute, and `eager` takes that long. Providers that fail, give a different result or do not fit the time
limit are listed with the reason. Writes <out>.json and <out>.svg, and prints a table.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plots
import points
import torch
import transformers
from points import DEVICE, ON_GPU
from rich.table import Table
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import gemm_kernels
import measure

ALIKE = 3e-2  # relative difference of two results that bfloat16 can cause
TITLES = {
    "eager": "eager",
    "grouped_mm": "grouped_mm",
    "batched_mm": "batched_mm",
    "liger": "Liger",
    "ours": "fused-mlp",
}
TITLES |= {"ours-cuda": "ours, CUDA", "ours-triton": "ours, Triton", "ours-mma": "ours, mma.sync"}
_MOST_BATCHED = 16  # batched_mm copies the weights of every choice
_MOST_EAGER = 16 if ON_GPU else 1 << 30  # tokens: 86 ms a call at 128 tokens on an H200
SLOW = ("eager", "liger")


@dataclass(frozen=True)
class Mixture:
    name: str
    experts: int
    top_k: int
    dim: int
    hidden: int
    tokens: tuple[int, ...]
    trained: tuple[int, ...] = ()  # numbers of tokens at which forward and backward are measured too
    of_gpt_oss: bool = False  # transposed weights with biases, gates and ups interleaved and limited

    @property
    def title(self) -> str:
        return f"{self.name} ({self.experts} experts of {self.dim} x {self.hidden}, {self.top_k} a token)"


GPU_MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768, (1, 16, 128, 1024, 4096), (4096,)),
    Mixture("Mixtral-8x7B", 8, 2, 4096, 14336, (1, 4096)),
    Mixture("vLLM's", 128, 8, 2816, 704, (1, 128, 4096)),
    Mixture("gpt-oss-20b", 32, 4, 2880, 2880, (1, 512, 4096), (512, 4096), of_gpt_oss=True),
)
CPU_MIXTURES = (Mixture("small", 64, 4, 1024, 512, (1, 64), (64,)),)
MIXTURES = GPU_MIXTURES if ON_GPU else CPU_MIXTURES


def experts_of(mixture: Mixture) -> nn.Module:
    """transformers' experts of a Qwen3-MoE, or of gpt-oss, with random weights."""
    if mixture.of_gpt_oss:
        sizes = {"intermediate_size": mixture.hidden, "num_local_experts": mixture.experts}
        kind, config = GptOssExperts, transformers.GptOssConfig(hidden_size=mixture.dim, **sizes)
    else:
        sizes = {"moe_intermediate_size": mixture.hidden, "num_experts": mixture.experts}
        kind, config = Qwen3MoeExperts, transformers.Qwen3MoeConfig(hidden_size=mixture.dim, **sizes)
    with torch.device(DEVICE):
        made = kind(config).bfloat16()
    for weight in made.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return made


def routed(mixture: Mixture, tokens: int, routing: str) -> tuple[Tensor, Tensor]:
    """Draws a router's choice: the experts of every token, and their weights."""
    rank = torch.arange(1, mixture.experts + 1, device=DEVICE, dtype=torch.float32)
    likely = -rank.log() if routing == "zipf" else torch.zeros_like(rank)
    # The largest values after adding Gumbel noise are a draw without replacement.
    noise = torch.rand(tokens, mixture.experts, device=DEVICE).log().neg().log().neg()
    index = (likely + noise).topk(mixture.top_k).indices
    return index, torch.rand(tokens, mixture.top_k, device=DEVICE).softmax(-1).bfloat16()


OF_GPT_OSS = {"activation": "quick_gelu", "interleaved": True, "transposed": True, "limit": 7.0, "up_offset": 1.0}


def ways(
    module: nn.Module, fused_mlp, tokens: int, slow: tuple[str, ...]
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The compared ways, by name."""

    def by_transformers(implementation: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module.config._experts_implementation = implementation
        return module(x, index, weights)

    def ours(backend: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        given = x, index, weights, module.gate_up_proj, module.down_proj
        with fused_mlp.backend(backend):
            if isinstance(module, GptOssExperts):
                biases = module.gate_up_proj_bias, module.down_proj_bias
                return fused_mlp.experts_mlp(*given, *biases, **OF_GPT_OSS)
            return fused_mlp.experts_mlp(*given)

    def forced(architecture: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        with gemm_kernels.forced(fused_mlp, architecture):
            return ours("cuda", x, index, weights)

    names = ["grouped_mm"]
    if tokens <= _MOST_EAGER and "eager" in slow:
        names.insert(0, "eager")
    if tokens <= _MOST_BATCHED:
        names.append("batched_mm")
    made = {name: partial(by_transformers, name) for name in names}
    made["ours"] = partial(ours, "auto")
    if ON_GPU:  # "auto" chooses one of them
        made["ours-cuda"] = partial(ours, "cuda")
        made["ours-triton"] = partial(ours, "triton")
        if gemm_kernels.runs_on("sm80", torch.cuda.get_device_capability()):
            # The kernels for other GPUs than Hopper; a Hopper GPU runs them if they are forced.
            made["ours-mma"] = partial(forced, "sm80")
    if "liger" in slow and not isinstance(module, GptOssExperts):
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        made["liger"] = lambda x, index, weights: LigerFusedMoEFunction.apply(
            x, module.gate_up_proj, module.down_proj, index, weights
        )
    return made


def trained(way: Callable, module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Forward and backward, for the gradients of all operands."""
    for weight in module.parameters():
        weight.grad = None
    leaves = x.detach().requires_grad_(), weights.detach().requires_grad_()
    way(leaves[0], index, leaves[1]).sum().backward()
    return leaves[0].grad


def failing(calls: dict[str, Callable[[], Tensor]], end: float) -> dict[str, str]:
    """The calls that fail, or do not agree with grouped_mm, or get no time before `end`, with the reasons."""
    expected = calls["grouped_mm"]().float()
    left = {}
    for name, call in calls.items():
        if time.monotonic() > end:
            left[name] = "no time left"
            continue
        with points.noting(left, name):
            difference = ((call().float() - expected).norm() / expected.norm()).item()
            if not difference <= ALIKE:
                left[name] = f"differs by {difference:.1e} from grouped_mm"
    return left


def run(given) -> dict:
    fused_mlp = points.package()
    found = {"machine": {**measure.machine(), "transformers": transformers.__version__, "dtype": "bfloat16"}}
    found["results"] = []
    cases = [
        (mixture, tokens, routing, backward)
        for routing in given.routing
        for mixture in MIXTURES
        if given.shapes is None or mixture.name in given.shapes
        for tokens in given.tokens or mixture.tokens
        for backward in ((False, True) if tokens in mixture.trained else (False,))
    ]
    clock = points.Clock(given.minutes, len(cases))
    slow = tuple(given.also) if ON_GPU else ("eager",)
    modules: dict[Mixture, nn.Module] = {}

    def figures(mixture: Mixture, tokens: int, routing: str, backward: bool) -> dict:
        if mixture not in modules:
            modules.clear()  # frees the previous one's memory first
            modules[mixture] = experts_of(mixture)
        module = modules[mixture]
        index, weights = routed(mixture, tokens, routing)
        x = torch.randn(tokens, mixture.dim, device=DEVICE).bfloat16()
        calls = {}
        for name, way in ways(module, fused_mlp, tokens, slow).items():
            if backward and (name == "eager" or name.startswith("ours-")):  # takes minutes; is the same as "ours"
                continue
            calls[name] = (
                partial(trained, way, module, x, index, weights) if backward else partial(way, x, index, weights)
            )
        with torch.set_grad_enabled(backward):
            left = failing(calls, clock.end)
            calls = {name: call for name, call in calls.items() if name not in left}
            compare = partial(measure.compare, rounds=given.rounds, budget_us=given.seconds * 1e6)
            return {"providers": points.compared(calls, compare, left), "left": left}

    def label(mixture: Mixture, tokens: int, routing: str, backward: bool) -> dict:
        shape = {"name": mixture.name, "experts": mixture.experts, "top_k": mixture.top_k}
        shape |= {"dim": mixture.dim, "hidden": mixture.hidden, "tokens": tokens}
        return {**shape, "routing": routing, "backward": backward}

    return points.collect(found, cases, label, figures, clock, given.out)


def best_of_others(result: dict, key: str) -> float:
    return min(figures[key] for name, figures in result["providers"].items() if not name.startswith("ours"))


def label(result: dict) -> str:
    tokens = f"{result['tokens']} token{'s' if result['tokens'] > 1 else ''}"
    what = f"{result['name']}, {tokens}, {result['routing']}"
    return f"{what}, with backward" if result["backward"] else what


def times(results: list[dict]) -> dict[str, str]:
    """The measured times and their names: GPU time only on a GPU."""
    on_gpu = any("kernel_us" in figures for result in results for figures in result["providers"].values())
    return {"kernel_us": "GPU time", "wall_us": "wall time"} if on_gpu else {"wall_us": "wall time"}


def print_table(found: dict) -> None:
    results = found["results"]
    names = [name for name in TITLES if any(name in result["providers"] for result in results)]
    for key, title in times(results).items():
        table = Table(title=f"{points.where(found)}: {title}, us")
        table.add_column("experts", no_wrap=True)
        for name in (*(TITLES[name] for name in names), "to the best"):
            table.add_column(name, justify="right", no_wrap=True)
        for result in results:
            figures = result["providers"]
            row = [f"{figures[name][key]:.0f}" if name in figures else "" for name in names]
            ratio = f"{figures['ours'][key] / best_of_others(result, key):.2f}" if "ours" in figures else ""
            table.add_row(label(result), *row, ratio)
        points.show(table)
    for result in results:
        for name, reason in result.get("left", {}).items():
            print(f"{label(result)}: {name}: {reason}")


def main():
    parser = points.parser(__doc__, "experts", rounds=7, seconds=0.05, minutes=4.0)
    parser.add_argument("--shapes", nargs="+", choices=[mixture.name for mixture in MIXTURES], help="of these alone")
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens, in the place of each shape's own")
    parser.add_argument("--routing", nargs="+", choices=("balanced", "zipf"), default=["balanced", "zipf"])
    parser.add_argument("--also", nargs="+", choices=SLOW, default=[], help="compared on a GPU besides the others")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    found = points.found_by(run, given)
    print_table(found)
    plots.experts(found["results"], points.where(found), given.out)


if __name__ == "__main__":
    main()
