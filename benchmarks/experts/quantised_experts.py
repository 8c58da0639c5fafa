"""Experts with quantised weights: FP8 as in Qwen3-30B-A3B-FP8, and MXFP4 as in gpt-oss.

    python benchmarks/experts/quantised_experts.py  all cases, on a GPU, in a minute
    python benchmarks/experts/quantised_experts.py --tokens 1 128

`ours` is experts_mlp with quantised stacks, and `decoded` the same, decoding the weights first for any number of rows.
`bf16` is experts_mlp with bfloat16 weights, and `floor` the time to read the codes and scales of the chosen experts at
the bandwidth of a copy. `hub` is what transformers runs for gpt-oss: its experts, which multiply by `matmul_ogs` of
kernels-community/gpt-oss-triton-kernels, found as a package on the path or on the Hub. Our calls sort the choices; the
hub's get them sorted. `routed` and `hub_routed` include everything from the router's logits on: the choice of experts,
their weights and the sort. transformers' kernels for FP8 are not measured. Calls run in CUDA graphs, with interleaved
routings. Writes <out>.json, and prints a table.
"""

import importlib
import itertools
import sys
import types
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kernels
import points
import torch
from torch import Tensor
from tqdm import tqdm

import measure

ROUTINGS = 8  # that alternate
HUB = "kernels-community/gpt-oss-triton-kernels"


@dataclass(frozen=True)
class Mixture:
    name: str
    experts: int
    top_k: int
    dim: int
    hidden: int
    format: str
    form: dict = field(default_factory=dict)


GPT_OSS = {"activation": "quick_gelu", "interleaved": True, "limit": 7.0, "up_offset": 1.0}
MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768, "fp8"),
    Mixture("gpt-oss-20b", 32, 4, 2880, 2880, "mxfp4", GPT_OSS),
)
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)


def stack(fused_mlp, mixture: Mixture, out: int, width: int):
    """Random weights of about the magnitude of a model's."""
    shape = mixture.experts, out, width
    if mixture.format == "fp8":
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        scales = torch.rand(mixture.experts, -(-out // 128), -(-width // 128), device="cuda") * width**-0.5
        return fused_mlp.QuantizedStack.from_fp8(values, scales)
    blocks = torch.randint(256, (*shape[:2], width // 32, 16), dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 122, (*shape[:2], width // 32), dtype=torch.uint8, device="cuda")
    return fused_mlp.QuantizedStack.from_mxfp4(blocks, scales)


class Routing:
    """The choice of experts by random logits, and as the hub's products take it."""

    def __init__(self, mixture: Mixture, tokens: int, sort: Callable | None) -> None:
        self.top_k = mixture.top_k
        self.logits = torch.randn(tokens, mixture.experts, device="cuda", dtype=torch.bfloat16)
        self.shares, self.index = self.choice()
        self.sorted = sort and sort(self.logits, self.top_k)

    def choice(self) -> tuple[Tensor, Tensor]:
        values, index = self.logits.topk(self.top_k)
        return values.softmax(-1), index


def called(fused_mlp, mixture: Mixture, x: Tensor, weights: list) -> Callable[[Routing], Tensor]:
    """A call with given experts."""
    return lambda at: fused_mlp.experts_mlp(x, at.index, at.shares, *weights, **mixture.form)


def routed(fused_mlp, mixture: Mixture, x: Tensor, weights: list) -> Callable[[Routing], Tensor]:
    """The same from logits, as transformers' router computes it."""

    def run(at: Routing) -> Tensor:
        shares, index = at.choice()
        return fused_mlp.experts_mlp(x, index, shares, *weights, **mixture.form)

    return run


def hub_experts(mixture: Mixture, weights: list) -> tuple[torch.nn.Module, Callable]:
    """transformers' experts with the weights of a checkpoint, and the routing of their kernels."""
    from transformers.integrations import mxfp4

    try:
        hub = importlib.import_module(HUB.split("/")[1].replace("-", "_"))
    except ImportError:
        hub = kernels.get_kernel(HUB, version=1)
    mxfp4.triton_kernels_hub = hub
    sizes = {"num_local_experts": mixture.experts, "intermediate_size": mixture.hidden, "hidden_size": mixture.dim}
    with torch.device("cuda"):
        experts = mxfp4.Mxfp4GptOssExperts(types.SimpleNamespace(**sizes))
    for name, stack, bias in zip(("gate_up_proj", "down_proj"), weights[:2], weights[2:], strict=True):
        mxfp4.swizzle_mxfp4_convertops(stack.data, stack.scales, experts, name, torch.device("cuda"), hub)
        getattr(experts, f"{name}_bias").copy_(bias)
    return experts, hub.routing.routing


def decoded_first(fused_mlp, call: Callable[[Routing], Tensor]) -> Callable[[Routing], Tensor]:
    """The same call without kernels that read codes."""
    operands = sys.modules[f"{fused_mlp.__name__}.quantized.experts"]
    none = {"MOST_ROWS": dict.fromkeys(operands.FORMATS, 0), "MOST_FEW_ROWS": dict.fromkeys(operands.FORMATS, 1 << 40)}

    def run(at: Routing) -> Tensor:
        with unittest.mock.patch.multiple(operands, **none):
            return call(at)

    return run


def in_turns(run: Callable[[Routing], Tensor], routings: list[Routing]) -> Callable[[], Tensor]:
    """A call that uses the next of these routings each time."""
    turn = itertools.cycle(routings)
    return lambda: run(next(turn))


def run(given) -> dict:
    fused_mlp = points.package("cuda")
    found = {"machine": measure.machine(), "results": [], "left": {}}
    bandwidth = measure.copy_bandwidth()
    for mixture in tqdm(MIXTURES, disable=None):
        stacks = [
            stack(fused_mlp, mixture, 2 * mixture.hidden, mixture.dim),
            stack(fused_mlp, mixture, mixture.dim, mixture.hidden),
        ]
        biases, hub, sort = [], None, None
        if mixture.format == "mxfp4":
            sizes = [(mixture.experts, each.shape[1]) for each in stacks]
            biases = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
            with points.noting(found["left"], "hub"):
                hub, sort = hub_experts(mixture, stacks + biases)
        wide = [weight.dequantize(torch.bfloat16) for weight in stacks]
        bytes_of_expert = sum(each.nbytes for weight in stacks for each in weight[:2]) / mixture.experts
        for tokens in given.tokens:
            x = torch.randn(tokens, mixture.dim, device="cuda", dtype=torch.bfloat16)
            routings = [Routing(mixture, tokens, sort) for _ in range(ROUTINGS)]
            ours = called(fused_mlp, mixture, x, stacks + biases)
            calls = {
                "ours": ours,
                "decoded": decoded_first(fused_mlp, ours),
                "bf16": called(fused_mlp, mixture, x, wide + biases),
                "routed": routed(fused_mlp, mixture, x, stacks + biases),
            }
            if hub is not None:
                calls["hub"] = lambda at, x=x, hub=hub: hub(x, *at.sorted)
                calls["hub_routed"] = lambda at, x=x, hub=hub, sort=sort: hub(x, *sort(at.logits, at.top_k))
            turns = {name: in_turns(call, routings) for name, call in calls.items()}
            with torch.no_grad():
                times = measure.compare_in_graphs(turns, 3, given.budget)
            chosen = sum(each.index.unique().numel() for each in routings) / ROUTINGS
            row = {"name": mixture.name, "format": mixture.format, "tokens": tokens}
            row |= {name: figures["graph_us"] for name, figures in times.items()}
            found["results"].append(row | {"floor": chosen * bytes_of_expert / bandwidth * 1e6})
        del stacks, wide, hub
        torch.cuda.empty_cache()
    return found


COLUMNS = {
    "ours": "ours",
    "hub": "hub",
    "routed": "ours, routed",
    "hub_routed": "hub, routed",
    "decoded": "decoded first",
    "bf16": "bf16 weights",
    "floor": "bytes",
}


def table(found: dict) -> str:
    lines = [
        f"| experts, tokens | {' | '.join(COLUMNS.values())} |",
        f"| --- |{' ---: |' * len(COLUMNS)}",
    ]
    for row in found["results"]:
        figures = (f"{row[name]:.0f}" if name in row else "" for name in COLUMNS)
        lines.append(f"| {row['name']} in {row['format']}, {row['tokens']} | {' | '.join(figures)} |")
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in found["left"].items())])


def main() -> None:
    parser = points.parser(__doc__, "quantised-experts", stored=False)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--budget", type=float, default=10_000.0, help="microseconds of a turn")
    given = parser.parse_args()
    found = run(given)
    print(table(found))
    points.write(found, given.out)


if __name__ == "__main__":
    main()
