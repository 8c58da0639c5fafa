"""A gated MLP with quantised weights: bitsandbytes' modules, torch's FP8 and int4 GEMMs, and this package.

    python benchmarks/formats/quantised.py                        all cases of this machine's list, in 8 minutes at most
    python benchmarks/formats/quantised.py --quick                tiny sizes and few turns, to see that it runs
    python benchmarks/formats/quantised.py --formats nf4 --rows 1 16
    python benchmarks/formats/quantised.py --models               whole models, as listed in quantised_models.py
    python benchmarks/formats/quantised.py --from build/quantised.json  show the results of such a run; measure nothing

`eager` is a gated MLP of bitsandbytes.nn.Linear4bit; for FP8 and integers, quantised_fp8.py and quantised_integers.py
describe it. `ours` is this package with the same weights, and `ours-bf16` with bfloat16 weights. On a GPU, calls run in
CUDA graphs and rotate through as many weights as keep them out of its L2 cache. On a CPU, times are the CPU time of one
thread. Writes <out>.json and, for MLPs, <out>.svg, and prints a table.
"""

import copy
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import bitsandbytes
import peft
import plots
import points
import quantised_fp8
import quantised_integers
import quantised_models
import torch
import torch.nn.functional as F
import transformers
from points import DEVICE, ON_GPU
from torch import Tensor, nn

import measure

FORMATS = {"nf4": ("nf4", False), "nf4-nested": ("nf4", True), "fp4": ("fp4", False)}
FP8 = {"fp8-blocks": (128, 128), "fp8-rows": None}  # block sizes
FP8_LAYERS = {"fp8-linear": "linear", "fp8-compressed-tensors": "compressed", "fp8-torchao": "torchao"}
INTEGERS = {
    "int8": quantised_integers.Int8MLP,
    "int4": quantised_integers.Int4MLP,
    "int4-tiles": quantised_integers.Int4TilesMLP,
}
ON_GPUS_ALONE = (*FP8, *FP8_LAYERS, "int4-tiles")
# The largest difference: torch's FP8 and bitsandbytes' int8 round x too.
TOLERANCES = {"int8": 0.05, "int4": 0.02, "int4-tiles": 0.02} | dict.fromkeys(FORMATS, 0.02)
TOLERANCES |= dict.fromkeys((*FP8, *FP8_LAYERS), 0.08)
PROVIDERS = ("eager", "ours", "ours-bf16")
WIDTHS = {"cuda": ((4096, 14336), (2048, 8192), (8192, 28672)), "cpu": ((2048, 5632), (1024, 4096))}
WIDTHS["quick"] = ((128, 256),)
ROWS = {"cuda": (1, 4, 16, 64, 256, 512, 2048, 8192), "cpu": (1, 4, 16, 64, 256), "quick": (1, 3)}
VERSIONS = {library.__name__: library.__version__ for library in (bitsandbytes, peft, transformers)}
L2_BYTES = 60e6  # more than the L2 of any GPU here
SILU = 4  # the code of the activation


class GatedMLP(nn.Module):
    """A gated MLP of bitsandbytes' layers, as in models quantised by transformers."""

    def __init__(self, width: int, hidden: int, quant_type: str, nested: bool) -> None:
        super().__init__()
        for name, sizes in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            options = {"compute_dtype": torch.bfloat16, "compress_statistics": nested, "quant_type": quant_type}
            self.add_module(name, bitsandbytes.nn.Linear4bit(*sizes, bias=False, **options))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def operands(self) -> tuple:
        """The weights in the op's form; gate and up share a code."""
        weights, layouts, offsets = [], [], []
        code = self.gate.weight.quant_state.code
        for layer in (self.gate, self.up, self.down):
            state = layer.weight.quant_state
            nest = state.state2 if state.nested else None
            weights += [layer.weight.data, state.absmax, code, nest and nest.absmax, nest and nest.code]
            layouts += [*state.shape, 1, state.blocksize, nest.blocksize if nest else 0]
            offsets.append(float(state.offset) if nest else 0.0)
        return weights, layouts, offsets

    def decoded(self, dtype: torch.dtype) -> list[Tensor]:
        weights = [layer.weight for layer in (self.gate, self.up, self.down)]
        return [bitsandbytes.functional.dequantize_4bit(each.data, each.quant_state).to(dtype) for each in weights]


@functools.lru_cache(maxsize=1)
def made(width: int, hidden: int, form: str) -> list[nn.Module]:
    """MLPs with more bytes in total than a GPU's L2 keeps until their next turn."""
    torch.manual_seed(0)
    of_value = 1.0 if form.startswith("fp8") or form == "int8" else 0.5
    copies = max(1, round(L2_BYTES / (3 * of_value * width * hidden)) + 1) if ON_GPU else 1
    with torch.device(DEVICE):
        if form in FP8:
            return [quantised_fp8.GatedMLP(width, hidden, FP8[form]) for _ in range(copies)]
        if form in FP8_LAYERS:
            return [quantised_fp8.LayersMLP(width, hidden, FP8_LAYERS[form]) for _ in range(copies)]
        if form in INTEGERS:
            return [INTEGERS[form](width, hidden).to(DEVICE).requires_grad_(False) for _ in range(copies)]
        mlps = [GatedMLP(width, hidden, *FORMATS[form]) for _ in range(copies)]
    return [mlp.to(DEVICE).requires_grad_(False) for mlp in mlps]


def calls_of(
    rows: int, width: int, hidden: int, form: str, fused_mlp, providers: list[str], left: dict[str, str]
) -> dict[str, Callable]:
    """A call of each provider that uses another MLP each time, without providers that fail or whose results differ."""
    ops = importlib.import_module(f"{fused_mlp.__name__}._ops").ops
    modules = made(width, hidden, form)
    x = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
    plain = modules[0].decoded(torch.bfloat16)

    def of_ours(module: nn.Module) -> Callable[[], Tensor]:
        operands = module.operands()
        return lambda: ops.quantized_mlp(x, *operands, [None] * 3, SILU, True)

    def of_its_own(module: nn.Module) -> Callable[[], Tensor]:
        # On a CPU bitsandbytes repacks weights at the first call in eval mode.
        own = module if ON_GPU else copy.deepcopy(module).eval()
        return lambda: own(x)

    ways = {
        "eager": lambda: [of_its_own(module) for module in modules],
        "ours": lambda: [of_ours(module) for module in modules],
        "ours-bf16": lambda: [lambda: fused_mlp.gated_mlp(x, *plain, activation="silu")],
    }
    gate, up, down = plain
    expected, calls = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down).float(), {}
    for name in ways:  # eager's results first: ours are compared with them
        with points.noting(left, name):
            runs = ways[name]()
            found = runs[0]().float()
            if name == "ours" and (found - expected).norm() > TOLERANCES[form] * expected.norm():
                raise RuntimeError("the results differ")
            expected = found if name == "eager" else expected
            turns = itertools.cycle(runs)
            calls[name] = lambda turns=turns: next(turns)()
    for name in set(left) - set(providers):
        del left[name]
    return {name: calls[name] for name in providers if name in calls}


def thread_times(calls: dict[str, Callable], rounds: int, budget_us: float) -> dict[str, dict[str, float]]:
    """CPU time of one thread: the minimum over a turn's calls, interleaved. Other processes do not count."""
    torch.set_num_threads(1)

    def turn(call: Callable) -> dict[str, float]:
        times, end = [], time.perf_counter() + budget_us * 1e-6
        while len(times) < 3 or time.perf_counter() < end:
            before = time.thread_time_ns()
            call()
            times.append(time.thread_time_ns() - before)
        return {"thread_us": min(times) * 1e-3}

    return measure.in_turns({name: functools.partial(turn, call) for name, call in calls.items()}, rounds)


@torch.no_grad()
def run(given) -> dict:
    fused_mlp, kind = points.package(), "quick" if given.quick else DEVICE
    todo = [
        (rows, *sizes, form)
        for sizes in WIDTHS[kind]
        for form in given.formats
        for rows in given.rows or ROWS[kind]
        if form in ("nf4", "fp8-blocks", "fp8-linear", *INTEGERS) or sizes == WIDTHS[kind][0]
    ]
    if given.models:
        todo = quantised_models.points_of(given.formats)
    found = {"machine": {**measure.machine(), **VERSIONS}, "results": []}

    def figures(*point) -> dict:
        if given.models:
            return quantised_models.figures(*point, fused_mlp=fused_mlp, given=given)
        left: dict[str, str] = {}
        calls = calls_of(*point, fused_mlp, given.providers, left)
        compare = measure.compare_in_graphs if ON_GPU else thread_times
        compare_all = functools.partial(compare, rounds=given.rounds, budget_us=given.seconds * 1e6)
        return {"providers": points.compared(calls, compare_all, left), "left": left}

    def label(*point) -> dict:
        return {"shape": point[:-1], "format": point[-1]}

    return points.collect(found, todo, label, figures, points.Clock(given.minutes, len(todo)), given.out)


def main() -> None:
    parser = points.parser(__doc__, "quantised", rounds=5, seconds=0.02, minutes=8.0)
    all_here = [form for form in TOLERANCES if ON_GPU or form not in ON_GPUS_ALONE]
    parser.add_argument("--formats", nargs="+", choices=list(TOLERANCES), default=all_here)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--rows", nargs="+", type=int, help="these, not those of this machine's list")
    parser.add_argument("--models", action="store_true", help="whole models, not MLPs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    given = parser.parse_args()
    with torch._dynamo.config.patch(**quantised_fp8.COMPILED):
        found = points.found_by(run, given)
    points.print_table(found, "quantised weights", plots.quantised_case)
    if not given.models:
        plots.quantised(found["results"], points.where(found), given.out)


if __name__ == "__main__":
    main()
