"""Forward and backward of one gated MLP against its peers: time, and memory.

    python benchmarks/training.py                        the shapes of this machine's list
    python benchmarks/training.py --shapes 1024,1024,4096 --providers eager compile ours
    python benchmarks/training.py --from build/training.json     show what such a run has written; measure nothing

All providers of a shape take turns in one process, long enough for the clock to settle; the medians of the turns count.
"Saved" is what a forward leaves for the backward beside its result, "peak" the most that both allocate. `gemms` are the
six products alone, which give no answer. Writes <out>.json and <out>.svg, and prints a table.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import project

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())

import kernels
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import measure

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES = {
    "cuda": [
        (8192, 768, 3072),
        (1024, 1024, 4096),
        (8192, 2048, 16384),
        (16384, 4096, 14336),
        (131072, 4096, 14336),
    ],
    "cpu": [(16, 384, 1536), (128, 768, 3072), (1024, 768, 3072)],
}
TIMES = {"kernel_us": "GPU us", "wall_us": "wall us", "saved": "saved MiB", "peak": "peak MiB"}
MLP = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def eager(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def liger(name: str) -> MLP:
    """The MLP as Liger computes it, with the pointwise part fused or tile by tile."""
    if name == "liger-tiled":
        from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

        def tiled(x: Tensor, *weights: Tensor) -> Tensor:
            holder = torch.nn.Module()
            return apply_tiled_mlp(
                lambda module, part: eager(part, *weights), holder, x[None], None, [*weights]
            ).squeeze(0)

        return tiled
    product = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    return lambda x, gate, up, down: F.linear(product(F.linear(x, gate), F.linear(x, up)), down)


def quack() -> MLP:
    from quack.mlp import mlp_func

    def run(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        interleaved = torch.stack([gate, up], dim=1).flatten(0, 1)
        return mlp_func(x, interleaved, down, activation="swiglu")

    return run


def makers(fused_mlp) -> dict[str, Callable[[], MLP]]:
    def ours(memory: str) -> MLP:
        return lambda x, gate, up, down: fused_mlp.gated_mlp(x, gate, up, down, activation="silu", memory=memory)

    return {
        "eager": lambda: eager,
        "compile": lambda: torch.compile(eager),
        "checkpoint": lambda: lambda *given: checkpoint(eager, *given, use_reentrant=False, preserve_rng_state=False),
        "liger": lambda: liger("liger"),
        "liger-tiled": lambda: liger("liger-tiled"),
        "quack": quack,
        "ours": lambda: ours("activations"),
        "ours-recompute": lambda: ours("recompute"),
        "ours-compiled": lambda: torch.compile(ours("activations")),
    }


NEEDS = {"liger": "liger_kernel", "liger-tiled": "liger_kernel", "quack": "quack"}
PROVIDERS = ("eager", "compile", "checkpoint", "liger", "liger-tiled", "quack", "gemms", *makers(None))
PROVIDERS = tuple(dict.fromkeys(PROVIDERS))


def unavailable(name: str) -> str | None:
    if name in NEEDS and not ON_GPU:
        return "it is for GPUs"
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        return f"{NEEDS[name]} is not installed"
    return None


def six_gemms(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Callable[[], object]:
    """The products of a forward and a backward, gate and up as one."""
    packed, hidden = torch.cat([gate, up]).detach(), torch.randn(len(x), len(gate), dtype=x.dtype, device=x.device)
    x, down = x.detach(), down.detach()
    both, grad = torch.cat([hidden, hidden], 1), torch.randn_like(x)

    def run() -> None:
        F.linear(x, packed), F.linear(hidden, down)
        grad @ down, grad.t() @ hidden, both @ packed, both.t() @ x

    return run


def figures(shape: tuple[int, int, int], dtype: torch.dtype, wanted: list[str], fused_mlp, given) -> dict:
    rows, width, hidden = shape
    x = torch.randn(rows, width, dtype=dtype, device=DEVICE)
    weights = [torch.randn(hidden, width, dtype=dtype, device=DEVICE) * width**-0.5 for _ in range(2)]
    weights.append(torch.randn(width, hidden, dtype=dtype, device=DEVICE) * hidden**-0.5)
    operands = [tensor.requires_grad_() for tensor in (x, *weights)]
    grad = torch.randn(rows, width, dtype=dtype, device=DEVICE)
    steps, memory, left = {}, {}, {}
    expected = torch.autograd.grad(eager(*operands), operands, grad)
    for name in wanted:
        reason = unavailable(name)
        if reason is None and name == "gemms":
            steps[name] = six_gemms(*operands)
            continue
        try:
            if reason is None:
                mlp = makers(fused_mlp)[name]()

                def backward(result: Tensor) -> tuple[Tensor, ...]:
                    return torch.autograd.grad(result, operands, grad)

                for one, other in zip(backward(mlp(*operands)), expected, strict=True):
                    if not (one - other).float().norm() <= 3e-2 * other.float().norm():
                        raise RuntimeError("its gradients are not eager's")
                memory[name] = measure.saved_and_peak(lambda mlp=mlp: mlp(*operands), backward)
                steps[name] = lambda mlp=mlp, backward=backward: backward(mlp(*operands))
        except Exception as error:  # a peer that does not run here is left out, with its words
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            left[name] = reason
    del expected
    found = measure.compare(steps, given.rounds, given.seconds * 1e6)
    for name, (saved, peak) in memory.items():
        found[name] |= {"saved": saved / 2**20, "peak": peak / 2**20}
    return {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "providers": found, "left": left}


def run(given) -> dict:
    fused_mlp = kernels.get_kernel(project.repo_id(), version=project.version(), backend=DEVICE, trust_remote_code=True)
    shapes = given.shapes or SHAPES[DEVICE]
    found = {"machine": measure.machine(), "results": []}
    with tqdm(total=len(shapes) * len(given.dtypes), disable=None) as progress:
        for dtype in given.dtypes:
            for shape in shapes:
                progress.set_description(f"{shape}, {dtype}")
                found["results"].append(figures(shape, getattr(torch, dtype), given.providers, fused_mlp, given))
                torch._dynamo.reset()
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
                progress.update()
    return found


def print_table(found: dict) -> None:
    table = Table(title=f"{found['machine'].get('gpu') or found['machine']['cpu']}: forward and backward (to eager)")
    table.add_column("M, D, H")
    table.add_column("provider", no_wrap=True)
    columns = [key for key in TIMES if any(key in of for r in found["results"] for of in r["providers"].values())]
    for key in columns:
        table.add_column(TIMES[key], justify="right", no_wrap=True)
    for result in found["results"]:
        base = result["providers"].get("eager", {})
        for name, of in result["providers"].items():
            cells = [
                f"{of[key]:.3g} ({of[key] / base[key]:.2f})" if key in of and base.get(key) else f"{of.get(key, '')}"
                for key in columns
            ]
            table.add_row(f"{', '.join(map(str, result['shape']))} {result['dtype']}", name, *cells)
        for name, reason in result["left"].items():
            table.add_row("", name, reason)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def plot(found: dict, path: Path) -> None:
    """Time and peak memory of every provider as parts of eager's."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    key = "kernel_us" if any("kernel_us" in r["providers"].get("eager", {}) for r in found["results"]) else "wall_us"
    results = [result for result in found["results"] if "eager" in result["providers"]]
    figure, axes = plt.subplots(1, max(len(results), 1), figsize=(3.2 * max(len(results), 1), 3.4), squeeze=False)
    for axis, result in zip(axes[0], results, strict=False):
        base = result["providers"]["eager"]
        for name, of in result["providers"].items():
            if "peak" in of:
                axis.plot(of[key] / base[key], of["peak"] / base["peak"], "o", label=name)
        axis.set_title(f"{', '.join(map(str, result['shape']))}\n{result['dtype']}", fontsize="small")
        axis.set_xlabel("time, eager = 1")
    axes[0][0].set_ylabel("peak memory, eager = 1")
    axes[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=lambda text: tuple(map(int, text.split(","))), help="M,D,H each")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32", "float16"], default=["bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of every provider")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn")
    parser.add_argument("--from", dest="source", type=Path, help="show what such a run has written; measure nothing")
    parser.add_argument("--out", type=Path, default=Path("build/training"))
    given = parser.parse_args()
    found = json.loads(given.source.read_text()) if given.source else run(given)
    print_table(found)
    plot(found, given.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
