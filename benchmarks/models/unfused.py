"""Models whose MLPs cannot be fused as a whole: the cost or gain of fuse_mlps there.

    python benchmarks/models/unfused.py  every kind that this machine can run
    python benchmarks/models/unfused.py --kinds nf4 hook --rows 1 512

A Llama of --layers layers (2048 x 8192 on a GPU, 256 x 704 on a CPU) runs inference with bitsandbytes' NF4 and int8
weights, and with a forward hook on each down projection. An unfused and a fused copy run interleaved, each a few times
in a row; a figure is the median of the ratios of neighbours, with its quartiles.
"""

import copy
import statistics
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import points
import torch
from points import DEVICE, ON_GPU
from rich.table import Table
from torch import nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import measure

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SIZES = {"hidden_size": 2048, "intermediate_size": 8192} if ON_GPU else {"hidden_size": 256, "intermediate_size": 704}
KINDS = ("plain", "hook", "nf4", "int8")


def llama(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, vocab_size=1024, num_attention_heads=16, num_key_value_heads=4, **SIZES
    )
    return LlamaForCausalLM(config).to(DEVICE, DTYPE).eval()


def quantised(model: nn.Module, kind: str) -> nn.Module:
    import bitsandbytes

    for path, part in list(model.named_modules()):
        if type(part) is nn.Linear and "layers" in path:
            size = part.in_features, part.out_features, False
            if kind == "nf4":
                other = bitsandbytes.nn.Linear4bit(*size, compute_dtype=DTYPE, quant_type="nf4")
            else:
                other = bitsandbytes.nn.Linear8bitLt(*size, has_fp16_weights=False)
            other.load_state_dict({"weight": part.weight.data.cpu()}, strict=False)
            model.set_submodule(path, other.to(DEVICE))
    return model


def made(kind: str, layers: int) -> nn.Module:
    model = llama(layers)
    if kind in ("nf4", "int8"):
        return quantised(model, kind)
    if kind == "hook":
        for part in model.modules():
            if hasattr(part, "down_proj"):
                part.down_proj.register_forward_hook(lambda *_: None)
    return model


def step(model: nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids)


def seconds(model: nn.Module, ids: torch.Tensor, count: int) -> float:
    measure.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step(model, ids)
    measure.synchronize()
    return time.perf_counter() - start


def ratios(models: list[nn.Module], rows: int, turns: int) -> list[float]:
    ids = torch.randint(0, 1024, (1, rows), device=DEVICE)
    for model in models:
        seconds(model, ids, 3)
    count = max(2, int(0.05 / (seconds(models[0], ids, 3) / 3)))
    found = []
    for turn in range(turns):
        first = turn % 2  # each runs first in every second turn
        times = {index: seconds(models[index], ids, count) for index in (first, 1 - first)}
        found.append(times[1] / times[0])
    return sorted(found)


def main() -> None:
    parser = points.parser(__doc__, "bench/unfused", stored=False, rounds=24)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS if ON_GPU else KINDS[:2])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 512, 4096] if ON_GPU else [1, 16, 256])
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    kernel = points.package()
    table = Table("model", "rows", "fused / unfused", "quartiles", "what fuse_mlps says")
    results = []
    todo = [(kind, rows) for kind in arguments.kinds for rows in arguments.rows]
    models, report, of_kind = [], None, None
    for kind, rows in tqdm(todo, unit="point", file=sys.stderr):
        if kind != of_kind:
            models = [made(kind, arguments.layers) for _ in range(2)]
            models[1].load_state_dict(copy.deepcopy(models[0].state_dict()), strict=False)
            report, of_kind = kernel.fuse_mlps(models[1]), kind
        found = ratios(models, rows, arguments.rounds)
        low, median, high = statistics.quantiles(found, n=4)
        said = str(report).splitlines()[0]
        results.append({"kind": kind, "rows": rows, "ratios": found, "report": said})
        table.add_row(kind, str(rows), f"{median:.3f}", f"{low:.3f} to {high:.3f}", said)
    points.write({"machine": measure.machine(), "points": results}, arguments.out)
    points.show(table, 120)


if __name__ == "__main__":
    main()
