"""Ours against the peers, side by side in one process: kernel time, wall time and CPU time of one forward.

    python benchmarks/peers.py                                   the table of docs/performance.md
    python benchmarks/peers.py --shapes 64,768,3072 --providers eager ours
    python benchmarks/peers.py --sweep --providers eager ours    every M of the sweep, against eager alone
    python benchmarks/peers.py --workload linear                 one linear layer with bias and GELU
    python benchmarks/peers.py --workload pointwise              act(gate) * up, against a copy of as many bytes

Writes <out>.json (figures and the machine's facts) and <out>.svg (speed-up over eager), and prints a table. Peers that
are not installed (liger-kernel, quack-kernels) are left out, and said so.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import project

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())

import kernels
import measure
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

TABLE = [
    (8192, 768, 3072),
    (1024, 1024, 4096),
    (8192, 2048, 16384),
    (8192, 4096, 14336),
    (2048, 4096, 14336),
    (256, 4096, 14336),
    (16, 4096, 14336),
    (1, 4096, 14336),
    (1, 2048, 16384),
]
LINEAR_TABLE = [(8192, 768, 3072), (8192, 3072, 768), (4096, 1024, 4096), (16384, 1280, 5120)]
SWEEP_M = [1, 2, 4, 8, 16, 32, 64, 77, 128, 197, 256, 512, 1000, 1024, 2048, 3000, 4096, 8192, 16384]
SWEEP_DH = [
    (768, 3072),
    (1024, 4096),
    (1152, 6912),
    (2304, 9216),
    (2048, 16384),
    (3584, 14336),
    (4096, 14336),
    (5120, 17408),
    (1280, 5120),
]


def eager_mlp(x, gate, up, down):
    return F.linear(F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up), down)


def eager_act_and_mul(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def eager_linear(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def compiled(function, *operands, **options):
    function = torch.compile(function, **options)
    return lambda: function(*operands)


def installed(module):
    return importlib.util.find_spec(module) is not None


def mlp_providers(shape, dtype, fused_mlp, wanted):
    """Callables that compute down(gelu_tanh(gate(x)) * up(x)), by name; `gemms` computes the products alone."""
    m, d, h = shape
    x = torch.randn(m, d, dtype=dtype, device="cuda")
    gate, up = (torch.randn(h, d, dtype=dtype, device="cuda") * d**-0.5 for _ in range(2))
    down = torch.randn(d, h, dtype=dtype, device="cuda") * h**-0.5
    packed = torch.cat([gate, up])
    hidden = torch.randn(m, h, dtype=dtype, device="cuda")

    def forced(name):
        def run():
            with fused_mlp.backend(name):
                return fused_mlp.gated_mlp(x, gate, up, down)

        return run

    def liger():
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        return lambda: F.linear(LigerGELUMulFunction.apply(F.linear(x, gate), F.linear(x, up)), down)

    def quack():
        from quack.gemm_interface import gemm_gated

        interleaved = torch.stack([gate, up], dim=1).reshape(2 * h, d)
        return lambda: F.linear(gemm_gated(x, interleaved.T, activation="geglu")[1], down)

    makers = {
        "eager": lambda: lambda: eager_mlp(x, gate, up, down),
        "compile": lambda: compiled(eager_mlp, x, gate, up, down),
        "compile-max": lambda: compiled(eager_mlp, x, gate, up, down, mode="max-autotune-no-cudagraphs"),
        "liger": liger,
        "quack": quack,
        "gemms": lambda: lambda: (F.linear(x, packed), F.linear(hidden, down)),
        "gate-up-gemm": lambda: lambda: F.linear(x, packed),
        "ours-gated": lambda: lambda: fused_mlp.gated_linear(x, gate, up),
        "ours": lambda: lambda: fused_mlp.gated_mlp(x, gate, up, down),
        "ours-triton": lambda: forced("triton"),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


def linear_providers(shape, dtype, fused_mlp, wanted):
    """Callables that compute gelu_tanh(x w^T + b), by name; `gemm` computes the product alone."""
    m, k, n = shape
    x = torch.randn(m, k, dtype=dtype, device="cuda")
    weight = torch.randn(n, k, dtype=dtype, device="cuda") * k**-0.5
    bias = torch.randn(n, dtype=dtype, device="cuda")
    makers = {
        "eager": lambda: lambda: eager_linear(x, weight, bias),
        "compile": lambda: compiled(eager_linear, x, weight, bias),
        "addmm-activation": lambda: lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
        "gemm": lambda: lambda: F.linear(x, weight),
        "ours": lambda: lambda: fused_mlp.linear(x, weight, bias, "gelu_pytorch_tanh"),
        "ours-erf": lambda: lambda: fused_mlp.linear(x, weight, bias, "gelu"),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


def pointwise_providers(shape, dtype, fused_mlp, wanted):
    """Callables that compute gelu_tanh(gate) * up, or its gradients, by name.

    `copy` and `copy-backward` move as many bytes as the forward (two reads, a write) and the backward (three and two).
    """
    gate, up, grad = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(3))
    half = gate.numel() // 2
    source = torch.randn(5 * half, dtype=dtype, device="cuda")
    target = torch.empty_like(source)
    gate_leaf, up_leaf = gate.clone().requires_grad_(), up.clone().requires_grad_()

    def backward(function):
        with torch.enable_grad():
            out = function(gate_leaf, up_leaf)
        return lambda: torch.autograd.grad(out, (gate_leaf, up_leaf), grad, retain_graph=True)

    def triton():
        with fused_mlp.backend("triton"):
            return fused_mlp.act_and_mul(gate, up)

    makers = {
        "eager": lambda: lambda: eager_act_and_mul(gate, up),
        "compile": lambda: compiled(eager_act_and_mul, gate, up),
        "copy": lambda: lambda: target[: 3 * half].copy_(source[: 3 * half]),
        "ours": lambda: lambda: fused_mlp.act_and_mul(gate, up),
        "ours-triton": lambda: triton,
        "eager-backward": lambda: backward(eager_act_and_mul),
        "copy-backward": lambda: lambda: target.copy_(source),
        "ours-backward": lambda: backward(fused_mlp.act_and_mul),
    }
    return {name: make() for name, make in makers.items() if name in wanted}


WORKLOADS = {
    "mlp": (
        mlp_providers,
        TABLE,
        [
            "eager",
            "compile",
            "compile-max",
            "liger",
            "quack",
            "gemms",
            "gate-up-gemm",
            "ours-gated",
            "ours",
            "ours-triton",
        ],
    ),
    "pointwise": (
        pointwise_providers,
        [(8192, 3072), (1024, 4096), (8192, 14336)],
        ["eager", "compile", "copy", "ours", "ours-triton", "eager-backward", "copy-backward", "ours-backward"],
    ),
    "linear": (linear_providers, LINEAR_TABLE, ["eager", "compile", "addmm-activation", "gemm", "ours", "ours-erf"]),
}
COLORS = {"ours": "#d62728", "ours-triton": "#ff9896", "gemms": "#bbbbbb"}
PARTS = ("gate-up-gemm", "ours-gated", "gemm")  # of the work: in the table, not in the plot of speed-ups
NEEDS = {"liger": "liger_kernel", "quack": "quack"}


def print_table(results):
    table = Table(title="microseconds; ratios to eager in the same run")
    for column in ("shape", "provider", "kernels", "GPU", "ratio", "wall", "ratio", "CPU"):
        table.add_column(column, justify="left" if column in ("shape", "provider") else "right", no_wrap=True)
    for result in results:
        eager = result["providers"].get("eager")
        for i, (name, f) in enumerate(result["providers"].items()):
            ratios = [f"{f[key] / eager[key]:.2f}" if eager else "" for key in ("kernel_us", "wall_us")]
            shape = " x ".join(map(str, result["shape"])) if i == 0 else ""
            times = [f"{f[key]:.1f}" for key in ("kernel_us", "wall_us", "cpu_us")]
            kernels_launched = f"{f['kernels']:.0f}"
            table.add_row(shape, name, kernels_launched, times[0], ratios[0], times[1], ratios[1], times[2])
    Console().print(table)


def plot(results, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names = [name for name in results[0]["providers"] if name not in ("eager", *PARTS)]
    figure, axes = plt.subplots(figsize=(max(6, 1.4 * len(results)), 4), layout="constrained")
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        present = [(j, r["providers"]) for j, r in enumerate(results) if name in r["providers"]]
        positions = [j + (i - (len(names) - 1) / 2) * width for j, _ in present]
        speedups = [p["eager"]["kernel_us"] / p[name]["kernel_us"] for _, p in present]
        axes.bar(positions, speedups, width, label=name, color=COLORS.get(name))
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(results)), ["\n".join(map(str, r["shape"])) for r in results])
    axes.set_ylabel("speed-up over eager (GPU time)")
    axes.legend(fontsize="small", ncols=4)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="mlp")
    parser.add_argument("--shapes", nargs="+", help="M,D,H (mlp), M,K,N (linear) or M,H (pointwise)")
    parser.add_argument("--sweep", action="store_true", help="every M and (D, H) of the sweep")
    parser.add_argument("--providers", nargs="+")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-us", type=float, default=20_000.0, help="time of one provider's turn")
    parser.add_argument("--out", type=Path, default=Path("peers"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; examples/demo.py compares on a CPU")
    make_providers, shapes, all_providers = WORKLOADS[arguments.workload]
    wanted = arguments.providers or [p for p in all_providers if p not in NEEDS or installed(NEEDS[p])]
    for name in set(all_providers) - set(wanted) if not arguments.providers else ():
        print(f"{name}: left out, {NEEDS[name]} is not installed")
    if arguments.shapes:
        shapes = [tuple(map(int, shape.split(","))) for shape in arguments.shapes]
    elif arguments.sweep:
        shapes = [(m, d, h) for d, h in SWEEP_DH for m in SWEEP_M]
    fused_mlp = kernels.get_kernel(project.repo_id(), version=project.version(), trust_remote_code=True)
    results = []
    with torch.no_grad():
        for shape in tqdm(shapes, disable=None):
            torch._dynamo.reset()
            providers = make_providers(shape, getattr(torch, arguments.dtype), fused_mlp, wanted)
            figures = measure.compare(providers, arguments.rounds, arguments.budget_us)
            results.append({"shape": shape, "providers": figures})
    print_table(results)
    facts = {**measure.machine(), "workload": arguments.workload, "dtype": arguments.dtype}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")
    if any("eager" in r["providers"] and len(r["providers"]) > 1 for r in results):
        plot(results, arguments.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
