"""Experts with quantised weights: FP8 as in Qwen3-30B-A3B-FP8, and MXFP4 as in gpt-oss.

    python benchmarks/experts/quantised_experts.py  all cases, on a GPU, in a minute
    python benchmarks/experts/quantised_experts.py --tokens 1 128

`ours` is experts_mlp with quantised stacks, and `decoded` the same, decoding the weights first for any number of rows.
`bf16` is experts_mlp with bfloat16 weights, and `floor` the time to read the codes and scales of the chosen experts at
the bandwidth of a copy. transformers' own kernels for both formats come from the Hub and are not measured. Calls run in
CUDA graphs, with interleaved routings. Writes <out>.json, and prints a table.
"""

import itertools
import sys
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import points
import torch
from torch import Tensor
from tqdm import tqdm

import measure

ROUTINGS = 8  # that alternate


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
TOKENS = (1, 16, 64, 128, 256, 1024, 4096)


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


def called(fused_mlp, mixture: Mixture, x: Tensor, shares: Tensor, weights: list) -> Callable[[Tensor], object]:
    """A call with given experts."""
    return lambda index: fused_mlp.experts_mlp(x, index, shares, *weights, **mixture.form)


def decoded_first(fused_mlp, call: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """The same call without kernels that read codes."""
    operands = sys.modules[f"{fused_mlp.__name__}.quantized.experts"]
    none = {"MOST_ROWS": dict.fromkeys(operands.FORMATS, 0), "MOST_FEW_ROWS": dict.fromkeys(operands.FORMATS, 1 << 40)}

    def run(index: Tensor) -> object:
        with unittest.mock.patch.multiple(operands, **none):
            return call(index)

    return run


def in_turns(run: Callable[[Tensor], object], routings: list[Tensor]) -> Callable[[], object]:
    """A call that uses the next of these routings each time."""
    turn = itertools.cycle(routings)
    return lambda: run(next(turn))


def run(given) -> dict:
    fused_mlp = points.package("cuda")
    found = {"machine": measure.machine(), "results": []}
    bandwidth = measure.copy_bandwidth()
    for mixture in tqdm(MIXTURES, disable=None):
        weights = [
            stack(fused_mlp, mixture, 2 * mixture.hidden, mixture.dim),
            stack(fused_mlp, mixture, mixture.dim, mixture.hidden),
        ]
        wide = [weight.dequantize(torch.bfloat16) for weight in weights]
        bytes_of_expert = sum(each.nbytes for weight in weights for each in weight[:2]) / mixture.experts
        for tokens in given.tokens:
            x = torch.randn(tokens, mixture.dim, device="cuda", dtype=torch.bfloat16)
            drawn = (torch.rand(tokens, mixture.experts, device="cuda") for _ in range(ROUTINGS))
            routings = [each.topk(mixture.top_k).indices for each in drawn]
            shares = torch.rand(tokens, mixture.top_k, device="cuda").softmax(-1)

            calls = {
                "ours": called(fused_mlp, mixture, x, shares, weights),
                "decoded": decoded_first(fused_mlp, called(fused_mlp, mixture, x, shares, weights)),
                "bf16": called(fused_mlp, mixture, x, shares, wide),
            }
            turns = {name: in_turns(call, routings) for name, call in calls.items()}
            with torch.no_grad():
                times = measure.compare_in_graphs(turns, 3, given.budget)
            chosen = sum(each.unique().numel() for each in routings) / ROUTINGS
            row = {"name": mixture.name, "format": mixture.format, "tokens": tokens}
            row |= {name: figures["graph_us"] for name, figures in times.items()}
            found["results"].append(row | {"floor": chosen * bytes_of_expert / bandwidth * 1e6})
        del weights, wide
        torch.cuda.empty_cache()
    return found


def table(found: dict) -> str:
    lines = [
        "| experts, tokens | ours | decoded first | bf16 weights | bytes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in found["results"]:
        figures = (f"{row[name]:.0f}" for name in ("ours", "decoded", "bf16", "floor"))
        lines.append(f"| {row['name']} in {row['format']}, {row['tokens']} | {' | '.join(figures)} |")
    return "\n".join(lines)


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
