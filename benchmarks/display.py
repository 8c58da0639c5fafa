"""Tables that fit a terminal, and plots, of what peers.py measured."""

import sys

import break_even
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from providers import PARTS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

METRICS = {"kernel_us": "GPU time", "graph_us": "in CUDA graphs", "wall_us": "wall time"}
_COLORS = {"ours": "#d62728", "ours-triton": "#ff9896", "gemms": "#bbbbbb"}
_STYLES = {"pays": "green", "even": "yellow", "does not pay": "bold red", "too noisy to tell": "dim"}


def metrics(results: list[dict]) -> dict[str, str]:
    """The times that were measured, of which a CPU has one."""
    figures = next(iter(results[0]["providers"].values()))
    return {key: name for key, name in METRICS.items() if key in figures}


def print_table(results: list[dict]) -> None:
    """Every provider at every shape."""
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
    """Every M, a table for each kind of time, and where fusing pays in words."""
    console = Console(highlight=False)
    names = [name for name in results[0]["providers"] if name != "eager" and (name not in PARTS or name == "gemms")]
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


def plot(results: list[dict], path) -> None:
    """Bars of the speed-up over eager at each shape."""
    key = next(iter(metrics(results)))
    names = [name for name in results[0]["providers"] if name not in ("eager", *PARTS) or name == "gemms"]
    figure, axes = plt.subplots(figsize=(max(6, 1.4 * len(results)), 4), layout="constrained")
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        present = [(j, r["providers"]) for j, r in enumerate(results) if name in r["providers"]]
        positions = [j + (i - (len(names) - 1) / 2) * width for j, _ in present]
        speedups = [p["eager"][key] / p[name][key] for _, p in present]
        axes.bar(positions, speedups, width, label=name, color=_COLORS.get(name))
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(results)), ["\n".join(map(str, r["shape"])) for r in results])
    axes.set_ylabel(f"speed-up over eager ({METRICS[key]})")
    axes.legend(fontsize="small", ncols=4)
    figure.savefig(path)


def plot_over_m(results: list[dict], dim: int, hidden: int, where: str, path) -> None:
    """Lines of the speed-up over eager at each M; where it is a loss, and from which M on it is none."""
    measured = metrics(results)
    names = [name for name in results[0]["providers"] if name != "eager" and (name not in PARTS or name == "gemms")]
    figure, panels = plt.subplots(
        1, len(measured), figsize=(6.5 * len(measured), 4.2), squeeze=False, layout="constrained"
    )
    for axes, (key, metric) in zip(panels[0], measured.items(), strict=True):
        for name in names:
            points = [
                (r["shape"][0], r["providers"]["eager"][key] / r["providers"][name][key])
                for r in results
                if name in r["providers"]
            ]
            bold = {"linewidth": 2.5, "zorder": 3} if name == "ours" else {"linewidth": 1.2}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, color=_COLORS.get(name), **bold)
        ratios = break_even.ratios(results, key, "eager")
        losses = [(m, 1 / ratio.value) for m, ratio in ratios.items() if ratio.verdict == "does not pay"]
        if losses:
            axes.plot(
                *zip(*losses, strict=True), "x", color="black", markersize=10, zorder=4, label="fusing does not pay"
            )
        start = break_even.pays_from(ratios)
        if start is not None:
            axes.axvline(start, color="black", linestyle=":", linewidth=1)
            words = {"xy": (start, 0.97), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(f"pays from M = {start}", xytext=(4, 0), va="top", fontsize="small", **words)
        axes.axhline(1.0, color="black", linewidth=1)
        low, high = axes.get_ylim()
        low, high = min(low, 0.9), high + 0.12 * (high - low)  # room for the words
        axes.axhspan(low, 1.0, color="black", alpha=0.06, linewidth=0)
        axes.text(
            0.995,
            1.0,
            "slower than eager ",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="top",
            fontsize="small",
        )
        axes.set(ylim=(low, high), xlabel="M", title=metric)
        axes.legend(fontsize="small")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    panels[0][0].set_ylabel("speed-up over eager")
    figure.suptitle(f"The gated MLP, {dim} x {hidden}, {where}", fontsize="medium")
    figure.savefig(path)
