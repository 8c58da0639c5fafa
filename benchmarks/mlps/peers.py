"""This package against its peers, interleaved in one process: GPU time, wall time and CPU time of one forward.

    python benchmarks/mlps/peers.py --dim 768 --hidden 3072           one MLP at every M: from which M does it pay?
    python benchmarks/mlps/peers.py                                   the table of docs/performance.md
    python benchmarks/mlps/peers.py --shapes 64,768,3072 --providers eager ours
    python benchmarks/mlps/peers.py --sweep --providers eager ours    every M of the sweep, against eager alone
    python benchmarks/mlps/peers.py --sweep --graphs --providers eager ours  the same in CUDA graphs
    python benchmarks/mlps/peers.py --between 500 --graphs --providers eager ours  500 random shapes in between
    python benchmarks/mlps/peers.py --workload linear                 one linear layer with bias and GELU
    python benchmarks/mlps/peers.py --workload pointwise              act(gate) * up, against a copy of equal size
    python benchmarks/mlps/peers.py --from benchmarks/results/mlps/h100-sweep.json --dim 768 --hidden 3072
    python benchmarks/mlps/peers.py --limit 1.02                      fail if ours exceeds this ratio of eager's time

Writes <out>.json (figures and machine facts) and prints a table; with --dim, also draws a plot for each kind of time.
On a CPU only wall time is measured. Peers that cannot run on the machine are skipped with a message.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import benchmark
import benchmark_linear
import benchmark_pointwise
import break_even
import display
import plots
import points
import providers
import torch
from tqdm import tqdm

import measure

TABLES = {"mlp": benchmark.SHAPES, "linear": benchmark_linear.SHAPES, "pointwise": benchmark_pointwise.SHAPES}
SWEEP_M = [1, 2, 4, 8, 16, 32, 64, 77, 128, 197, 256, 512, 1000, 1024, 2048, 3000, 4096, 8192, 16384]
SWEEP_M_CPU = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
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
OVER_M = ["eager", "compile", "liger", "gemms", "ours", "ours-triton"]


def parse():
    parser = points.parser(__doc__, "peers", rounds=5)
    parser.add_argument("--workload", choices=providers.WORKLOADS, default="mlp")
    parser.add_argument("--dim", type=int, help="with --hidden: the MLP of that width, at every M")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--shapes", nargs="+", help="M,D,H (mlp), M,K,N (linear) or M,H (pointwise)")
    parser.add_argument("--sweep", action="store_true", help="every M and (D, H) of the sweep")
    parser.add_argument("--between", type=int, metavar="COUNT", help="shapes of the MLP drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of --between")
    parser.add_argument("--graphs", action="store_true", help="time calls in CUDA graphs")
    parser.add_argument("--providers", nargs="+")
    parser.add_argument("--activation", choices=providers.ACTIVATIONS, default=providers.GELU_TANH, help="of the MLP")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--budget-us", type=float, default=20_000.0, help="time of one provider's turn")
    parser.add_argument("--limit", type=float, help="of ours' time (GPU time on a GPU) to eager's: fails beyond it")
    given = parser.parse_args()
    if (given.dim is None) != (given.hidden is None):
        parser.error("--dim and --hidden go together")
    if given.dim is not None and (given.workload != "mlp" or given.shapes or given.sweep or given.between):
        parser.error("--dim and --hidden are for the MLP, without --shapes, --sweep and --between")
    if given.graphs and not (given.source or torch.cuda.is_available()):
        parser.error("--graphs needs a GPU")
    if given.activation != providers.GELU_TANH and given.workload != "mlp":
        parser.error("--activation is for the MLP")
    return given


def wanted_providers(given):
    """The requested names without those that cannot run here; naming one of these explicitly is an error."""
    names = given.providers or (OVER_M if given.dim else providers.WORKLOADS[given.workload][1])
    absent = {name: reason for name in names if (reason := providers.unavailable(name, given.activation))}
    if given.providers and absent:
        sys.exit("; ".join(f"{name} cannot run here: {reason}" for name, reason in absent.items()))
    for name, reason in absent.items():
        print(f"{name}: left out, {reason}")
    return [name for name in names if name not in absent]


def drawn(count, seed):
    """Draws rows and widths as in models: uniform in their logarithms, with widths that are multiples of 64."""
    chance = random.Random(seed)

    def between(low, high, step=1):
        return round(low * (high / low) ** chance.random() / step) * step

    return [(between(1, 16384), d := between(384, 8192, 64), between(2 * d, 5 * d, 64)) for _ in range(count)]


def wanted_shapes(given):
    ms = SWEEP_M if torch.cuda.is_available() else SWEEP_M_CPU
    if given.dim is not None:
        return [(m, given.dim, given.hidden) for m in ms]
    if given.between:
        return drawn(given.between, given.seed)
    if given.shapes:
        return [tuple(map(int, shape.split(","))) for shape in given.shapes]
    return [(m, d, h) for d, h in SWEEP_DH for m in ms] if given.sweep else TABLES[given.workload]


def run(given):
    """The figures of all shapes and providers, and facts about the machine."""
    make_providers, wanted = providers.WORKLOADS[given.workload][0], wanted_providers(given)
    fused_mlp = points.package()
    options = {"activation": given.activation} if given.workload == "mlp" else {}
    compare = measure.compare_in_graphs if given.graphs else measure.compare
    results = []
    with torch.no_grad():
        for shape in tqdm(wanted_shapes(given), disable=None):
            torch._dynamo.reset()
            made = make_providers(shape, getattr(torch, given.dtype), fused_mlp, wanted, **options)
            results.append({"shape": shape, "providers": compare(made, given.rounds, given.budget_us)})
    return {
        "machine": {**measure.machine(), "workload": given.workload, "dtype": given.dtype, **options},
        "results": results,
    }


def show(found, given):
    results = found["results"]
    compared = all("eager" in r["providers"] and len(r["providers"]) > 1 for r in results)
    if given.dim is None:
        display.print_table(results)
        return
    results = [r for r in results if list(r["shape"][1:]) == [given.dim, given.hidden]]
    if not results or not compared or "ours" not in results[0]["providers"]:
        sys.exit(f"{given.dim} x {given.hidden} was not measured with both eager and ours")
    facts = found["machine"]
    activation = facts.get("activation", providers.GELU_TANH)
    display.print_over_m(results, given.dim, given.hidden, activation)
    subject = f"{facts.get('gpu') or facts['cpu']}, {facts['dtype']}, {activation}"
    names = display.compared_with_eager(results)
    for key, metric in display.metrics(results).items():
        title = f"{metric} of the gated MLP, {given.dim} x {given.hidden}\n{subject}"
        path = given.out.with_name(f"{given.out.name}-{key.removesuffix('_us')}")
        plots.over_rows(*plots.lines_of(results, key, names), title, path)
        print(path.with_name(f"{path.name}.svg"))


def beyond(results, limit):
    """The shapes at which ours takes more than `limit` of eager's time, in words, or None."""
    key = next(iter(display.metrics(results)))
    slow = []
    for result in results:
        ratio = break_even.ratio(result, key, "ours", "eager")
        if ratio.value > limit:
            noisy = f" (too noisy to tell: a spread of {ratio.spread:.0%})" if ratio.is_noisy else ""
            slow.append(f"{', '.join(map(str, result['shape']))}: {ratio.value:.3f}{noisy}")
    return f"error: ours takes more than {limit} of eager's time at {'; '.join(slow)}" if slow else None


def main():
    given = parse()
    found = points.found_by(run, given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if not given.source:
        points.write(found, given.out)
    show(found, given)
    if given.limit is not None:
        sys.exit(beyond(found["results"], given.limit))


if __name__ == "__main__":
    main()
