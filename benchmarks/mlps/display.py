"""Tables of peers.py's measurements that fit a terminal."""

import sys

import break_even
from providers import PARTS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

METRICS = {"kernel_us": "GPU time", "graph_us": "in CUDA graphs", "wall_us": "wall time"}
_STYLES = {"pays": "green", "even": "yellow", "does not pay": "bold red", "too noisy to tell": "dim"}


def metrics(results: list[dict]) -> dict[str, str]:
    """The kinds of time that were measured; a CPU has one."""
    figures = next(iter(results[0]["providers"].values()))
    return {key: name for key, name in METRICS.items() if key in figures}


def compared_with_eager(results: list[dict]) -> list[str]:
    """The providers of the whole MLP, and its lower bound."""
    return [name for name in results[0]["providers"] if name != "eager" and (name not in PARTS or name == "gemms")]


def print_table(results: list[dict]) -> None:
    """Prints every provider at every shape."""
    title = "microseconds (spread of the turns); ratios to eager in the same run"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    measured = metrics(results)
    on_gpu = "kernel_us" in measured
    table.add_column("shape", no_wrap=True)
    table.add_column("provider", no_wrap=True)
    for column in [
        *(["kernels"] if on_gpu else []),
        *(c for name in measured.values() for c in (name.removesuffix(" time"), "ratio")),
    ]:
        table.add_column(column, justify="right", no_wrap=True)
    if on_gpu:
        table.add_column("CPU", justify="right", no_wrap=True)
    for result in results:
        eager = result["providers"].get("eager")
        for i, (name, figures) in enumerate(result["providers"].items()):
            row = [" x ".join(map(str, result["shape"])) if i == 0 else "", name]
            if on_gpu:
                row.append(f"{figures['kernels']:.0f}")
            for key in measured:
                spread = figures.get(f"{key}_spread")
                row.append(f"{figures[key]:.1f}" + (f" ({spread:.0%})" if spread is not None else ""))
                row.append(_ratio(break_even.ratio(result, key, name, "eager")) if eager else "")
            table.add_row(*row, *([f"{figures['cpu_us']:.1f}"] if on_gpu else []))
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def _ratio(ratio: break_even.Ratio) -> str:
    return "noisy" if ratio.is_noisy else f"{ratio.value:.2f}"


def _speedup(ratio: break_even.Ratio) -> str:
    return "noisy" if ratio.is_noisy else f"{1 / ratio.value:.2f}"


def print_over_m(results: list[dict], dim: int, hidden: int, activation: str) -> None:
    """Prints a table over M for each kind of time, and a sentence on where fusing pays."""
    console = Console(highlight=False)
    names = compared_with_eager(results)
    for key, metric in metrics(results).items():
        ratios = break_even.ratios(results, key, "eager")
        table = Table(title=f"speed-up over eager, {metric}, {dim} x {hidden}, {activation}")
        for column in ("M", "eager, us", *names):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("spread of ours", justify="right")
        table.add_column("fusing", no_wrap=True)
        for result in results:
            providers, m = result["providers"], result["shape"][0]
            compared = {name: break_even.ratio(result, key, name, "eager") for name in names if name in providers}
            speedups = [_speedup(compared[name]) if name in compared else "" for name in names]
            found = ratios[m].verdict
            words = f"[{_STYLES[found]}]{found}[/{_STYLES[found]}]"
            table.add_row(str(m), f"{providers['eager'][key]:.1f}", *speedups, f"{ratios[m].spread:.0%}", words)
        console.print(table)
        console.print(f"{metric}, against eager: {break_even.sentence(ratios)}.")
        if any(name not in ("eager", *PARTS) and not name.startswith("ours") for name in results[0]["providers"]):
            fastest = break_even.ratios(results, key, None)
            console.print(f"{metric}, against the fastest peer at each M: {break_even.sentence(fastest)}.")
    if "gemms" in names:
        console.print(
            "gemms: PyTorch's matrix products of the MLP alone, gate and up as one, without the activation and the "
            "product of the two. It does not compute the MLP: it shows what is left if all else cost nothing."
        )
