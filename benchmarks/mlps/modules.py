"""MLP modules of random kinds, widths and numbers of rows, fused against unfused, in inference and in training.

    python benchmarks/mlps/modules.py                            100 of each dtype, both ways
    python benchmarks/mlps/modules.py --number 400 --dtypes bfloat16 --ways training --seed 7
    python benchmarks/mlps/modules.py --from build/modules.json  show the results of such a run; measure nothing

The kinds are transformers classes: one layer with its activation, plain MLPs, gated ones, and gated ones with gate and
up packed in one weight. Fused and unfused instances, each with its own weights, run interleaved in one process; a
figure is the ratio of the medians. Any case above 1.05 of the original's time is measured again with other instances;
only if it is above 1.05 twice is it a loss rather than noise of a shared machine. A training step is a forward and a
backward that allocates all gradients. Freed memory stays with the process, because whether the C library returns it to
the system, to be mapped again page by page at the next call, is random and costs up to ten times the call. Writes
<out>.json, and prints a table.
"""

import contextlib
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import points
import torch
import transformers
from points import DEVICE
from rich.table import Table
from torch import nn
from tqdm import tqdm
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

import measure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = ("inference", "training")
KINDS = {
    "layer": (BertIntermediate, transformers.BertConfig, {"hidden_act": "gelu"}),
    "plain": (CLIPMLP, transformers.CLIPTextConfig, {"hidden_act": "gelu"}),
    "plain, quick": (CLIPMLP, transformers.CLIPTextConfig, {"hidden_act": "quick_gelu"}),
    "gated": (LlamaMLP, transformers.LlamaConfig, {"hidden_act": "silu"}),
    "gated, tanh": (GemmaMLP, transformers.GemmaConfig, {"hidden_act": "gelu_pytorch_tanh"}),
    "packed": (Phi3MLP, transformers.Phi3Config, {"pad_token_id": 0}),
    "packed, gelu": (ModernBertMLP, transformers.ModernBertConfig, {"mlp_dropout": 0.0}),
}
LOSS = 1.05  # times the original's time


def keep_memory() -> None:
    """Makes glibc, if that is the C library, keep freed memory."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_max = -1, -4
        library.mallopt(trim_threshold, 2**31 - 1)
        library.mallopt(mmap_max, 0)


class Point:
    """A kind of MLP, its widths, and its number of rows."""

    def __init__(self, chance: random.Random) -> None:
        self.kind = chance.choice(list(KINDS))
        self.rows = round(2 ** chance.uniform(0, 11))
        self.width = 8 * round(2 ** chance.uniform(3, 7))
        self.hidden = 8 * round(self.width * chance.uniform(1.5, 4.0) / 8)

    def __str__(self) -> str:
        return f"{self.kind}, {self.rows} x {self.width} x {self.hidden}"

    def build(self, dtype: torch.dtype, training: bool, fused_mlp=None) -> nn.Module:
        kind, config, options = KINDS[self.kind]
        sizes = {"hidden_size": self.width, "intermediate_size": self.hidden, "num_attention_heads": 4, **options}
        mlp = nn.ModuleList([kind(config(**sizes))]).to(DEVICE, dtype).train(training)
        if fused_mlp is not None and not fused_mlp.fuse_mlps(mlp).fused:
            sys.exit(f"{self} was not fused")
        return mlp[0]

    def call(self, dtype: torch.dtype, training: bool, fused_mlp=None) -> Callable[[], object]:
        mlp = self.build(dtype, training, fused_mlp)
        x = torch.randn(self.rows, self.width, device=DEVICE, dtype=dtype)
        if not training:
            return partial(mlp, x)
        x.requires_grad_()
        grad = torch.randn_like(mlp(x))

        def step() -> None:
            for leaf in (x, *mlp.parameters()):
                leaf.grad = None
            mlp(x).backward(grad)

        return step


def ratio(point: Point, dtype: torch.dtype, training: bool, fused_mlp, given) -> float:
    """The time of the fused modules relative to the originals': medians over the turns of all copies."""
    grad = contextlib.nullcontext() if training else torch.inference_mode()
    with grad:
        calls = {}
        for copy in range(given.copies):
            for name, package in (("eager", None), ("fused", fused_mlp)):
                calls[name, copy] = point.call(dtype, training, package)
        turns = {key: partial(turn, call, given.turn_us) for key, call in calls.items()}
        for take in turns.values():
            take()
        found: dict[str, list[float]] = {"eager": [], "fused": []}
        for _ in range(given.rounds):
            for (name, _), take in turns.items():
                found[name].append(take())
    return statistics.median(found["fused"]) / statistics.median(found["eager"])


def turn(call: Callable[[], object], length_us: float) -> float:
    """Average microseconds of the calls that fill a turn, without the first, which runs with cold caches."""
    call()
    calls = max(2, int(length_us / max(1.0, measure.wall_microseconds(call, 1))))
    return measure.wall_microseconds(call, calls)


def run(given) -> dict:
    keep_memory()
    fused_mlp = points.package()
    chance = random.Random(given.seed)
    torch.manual_seed(given.seed)
    found = {"machine": {**measure.machine(), "transformers": transformers.__version__}, "results": []}
    todo = [(name, way) for name in given.dtypes for way in given.ways] * given.number
    end = time.monotonic() + 60 * given.minutes
    for name, way in tqdm(todo, disable=None):
        if time.monotonic() > end:
            break
        point = Point(chance)
        measured = [ratio(point, DTYPES[name], way == "training", fused_mlp, given)]
        if measured[0] > LOSS:
            measured.append(ratio(point, DTYPES[name], way == "training", fused_mlp, given))
        found["results"].append({"dtype": name, "way": way, **vars(point), "ratios": [round(r, 3) for r in measured]})
    given.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found).replace('{"dtype"', '\n{"dtype"')  # a line for each point
    given.out.with_suffix(".json").write_text(text + "\n")
    return found


def print_table(found: dict) -> None:
    """Prints figures by dtype and way, then for each by number of rows, then the losses."""
    machine = found["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads, {machine['instructions']}"
    table = Table(title=f"{where}: time of fused modules, 1 = the original's")
    for column in ("dtype", "way", "rows", "points", "median", "95%", "worst", f"over {LOSS} twice"):
        table.add_column(column, justify="right", no_wrap=True)
    losses = []
    for dtype, way in sorted({(each["dtype"], each["way"]) for each in found["results"]}):
        of = [each for each in found["results"] if (each["dtype"], each["way"]) == (dtype, way)]
        for low, high in ((1, 2048), (1, 15), (16, 127), (128, 2048)):
            some = [each for each in of if low <= each["rows"] <= high]
            if some:
                ratios = sorted(each["ratios"][0] for each in some)
                twice = [each for each in some if min(each["ratios"]) > LOSS]
                shown = [f"{statistics.median(ratios):.2f}", f"{ratios[int(0.95 * len(ratios))]:.2f}"]
                shown += [f"{ratios[-1]:.2f}", str(len(twice))]
                table.add_row(dtype, way, f"{low} to {high}", str(len(some)), *shown)
                losses += twice if (low, high) == (1, 2048) else []
        table.add_section()
    points.show(table, 100)
    for each in losses:
        shape = f"{each['rows']} x {each['width']} x {each['hidden']}"
        print(f"{each['dtype']}, {each['way']}, {each['kind']}, {shape}: {each['ratios']}")


def main() -> None:
    parser = points.parser(__doc__, "modules", rounds=7, minutes=60)
    parser.add_argument("--number", type=int, default=100, help="points of each dtype and way")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--copies", type=int, default=2, help="instances of each variant")
    parser.add_argument("--turn-us", type=float, default=4000, help="length of a turn")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print_table(points.found_by(run, given))


if __name__ == "__main__":
    main()
