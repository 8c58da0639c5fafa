"""Plots of benchmark results, in a light and a dark version, narrow enough for a phone.

python benchmarks/plots.py        redraw the plots of the documents, from benchmarks/results into docs/images
"""

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import matplotlib

import project

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS, IMAGES = project.ROOT / "benchmarks/results", project.ROOT / "docs/images"
WIDTH = 4.4  # inches: on a phone's screen the letters are still 9 pixels high
SCHEMES = {
    "": {"ink": "#1f2328", "paper": "#ffffff", "grid": "#d1d9e0"},
    "-dark": {"ink": "#e6edf3", "paper": "#0d1117", "grid": "#3d444d"},
}
COLORS = ("#1a7f5a", "#d97706", "#3b82f6", "#a855f7", "#8b949e", "#e11d48")  # distinguishable on both backgrounds


@dataclass(frozen=True)
class Line:
    """Values over rows; ``spreads`` are half the range of the turns, relative to the values."""

    rows: list[int]
    values: list[float]
    spreads: list[float]
    color: str
    style: str = "-"


def save(path: Path, draw: Callable[[], plt.Figure]) -> None:
    """Draws <path>.svg, and <path>-dark.svg for a dark page."""
    for ending, scheme in SCHEMES.items():
        ink, paper = scheme["ink"], scheme["paper"]
        colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), ink)
        colors |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), paper)
        style = {"font.size": 8.5, "legend.fontsize": 8.5, "grid.color": scheme["grid"], "svg.hashsalt": "plots"}
        with matplotlib.rc_context(colors | style):
            figure = draw()
            figure.savefig(path.with_name(f"{path.name}{ending}.svg"), metadata={"Date": None})
            plt.close(figure)


# Whole models.

MODES = {"eager": "eager", "compiled": "compiled", "graphs": "CUDA graphs"}


def models(results: list[dict], where: str, path: Path) -> None:
    """Draws for each model and mode the speed-up over the same mode unfused, with the range of the copies."""
    modes = [mode for mode in MODES if any(mode in result["ratios"] for result in results)]

    def draw() -> plt.Figure:
        figure, axes = plt.subplots(figsize=(WIDTH, 1.4 + 0.4 * len(results)), layout="constrained")
        for place, mode in enumerate(modes):
            color, shift = COLORS[place], 0.24 * (place - (len(modes) - 1) / 2)
            rows = [row for row, result in enumerate(results) if mode in result["ratios"]]
            ratios = [results[row]["ratios"][mode] for row in rows]
            speedups = [1 / each["ratio"] for each in ratios]
            reach = [
                [speedup - 1 / each["high"] for speedup, each in zip(speedups, ratios, strict=True)],
                [1 / each["low"] - speedup for speedup, each in zip(speedups, ratios, strict=True)],
            ]
            axes.errorbar(
                speedups,
                [row + shift for row in rows],
                xerr=reach,
                fmt="o",
                markersize=4,
                color=color,
                label=MODES[mode],
            )
        axes.set_yticks(range(len(results)), [_titled(result, modes) for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        figure.supxlabel(f"speed-up over the same mode unfused, {where}\nbars: least to greatest of the copies", size=9)
        return _finish(figure, axes, len(modes))

    save(path, draw)


def _titled(result: dict, modes: list[str]) -> str:
    times = " / ".join(f"{result['variants'][mode]['ms']:.3g}" if mode in result["variants"] else "-" for mode in modes)
    return f"{result['model']}, {result['size']}\nunfused {times} ms"


# The MLP at every number of rows.


def over_rows(times: dict[str, Line], speedups: dict[str, Line], title: str, path: Path) -> None:
    """Draws times above and speed-ups over eager below, by the number of rows."""

    def draw() -> plt.Figure:
        figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 6.2), sharex=True, layout="constrained")
        for axes, lines in zip(panels, (times, speedups), strict=True):
            for name, line in lines.items():
                reach = [value * spread for value, spread in zip(line.values, line.spreads, strict=True)]
                axes.errorbar(
                    line.rows, line.values, yerr=reach, fmt=f"o{line.style}", markersize=3, color=line.color, label=name
                )
            axes.set_xscale("log", base=2)
            axes.grid(True, linewidth=0.5)
        panels[0].set(ylabel="time, µs", yscale="log")
        figure.suptitle(title, size=9)
        named = panels[0].get_legend_handles_labels()
        figure.legend(*named, loc="outside lower center", ncols=2 if len(times) > 3 else 3, frameon=False)
        panels[1].set(ylabel="speed-up over eager", xlabel="rows (tokens)")
        panels[1].axhline(1.0, color=matplotlib.rcParams["text.color"], linewidth=1)
        panels[1].xaxis.set_major_formatter("{x:.0f}")
        return figure

    save(path, draw)


def lines_of(results: list[dict], key: str, names: Iterable[str]) -> tuple[dict[str, Line], dict[str, Line]]:
    """The times and the speed-ups over eager of the providers of those names."""
    times, speedups = {}, {}
    for place, name in enumerate(("eager", *names)):
        of = [(result["shape"][0], result["providers"]) for result in results if name in result["providers"]]
        rows, color = [m for m, _ in of], COLORS[(place - 1) % len(COLORS)] if place else "#8b949e"
        spreads = [_spread(providers[name], key) for _, providers in of]
        times[name] = Line(rows, [providers[name][key] for _, providers in of], spreads, color)
        if place:
            ratios = [providers["eager"][key] / providers[name][key] for _, providers in of]
            both = [
                _spread(providers["eager"], key) + spread for (_, providers), spread in zip(of, spreads, strict=True)
            ]
            speedups[name] = Line(rows, ratios, both, color)
    return times, speedups


def _spread(figures: dict, key: str) -> float:
    return figures.get(f"{key}_spread", 0.0) / 2


def by_width(results: list[dict], key: str, widths: list[tuple[int, int]]) -> tuple[dict[str, Line], dict[str, Line]]:
    """Eager and ours at several widths of the MLP."""
    times, speedups = {}, {}
    for color, (dim, hidden) in zip(COLORS, widths, strict=False):
        of_width = [result for result in results if result["shape"][1:] == [dim, hidden]]
        found, gains = lines_of(of_width, key, ["ours"])
        times[f"{dim} x {hidden}, eager"] = replace(found["eager"], color=color, style=":")
        times[f"{dim} x {hidden}, fused"] = replace(found["ours"], color=color)
        speedups[f"{dim} x {hidden}"] = replace(gains["ours"], color=color)
    return times, speedups


# Experts of mixtures.

WAYS = {"ours": "fused-mlp", "grouped_mm": "grouped_mm", "batched_mm": "batched_mm", "liger": "Liger"}
SHORT = {"Qwen3-30B-A3B": "Qwen3 30B", "Mixtral-8x7B": "Mixtral 8x7B", "vLLM's": "128 of 2816 x 704"}


def experts(results: list[dict], where: str, path: Path) -> None:
    """Draws times of each way to compute a layer's experts; below each case's name, our gain over the next best."""
    results = [result for result in results if "ours" in result["providers"] and len(result["providers"]) > 1]
    on_gpu = any("kernel_us" in figures for result in results for figures in result["providers"].values())
    key, time = ("kernel_us", "GPU time") if on_gpu else ("wall_us", "wall time")

    def draw() -> plt.Figure:
        figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.34 * len(results)), layout="constrained")
        for color, (way, title) in zip(COLORS, WAYS.items(), strict=False):
            rows = [row for row, result in enumerate(results) if way in result["providers"]]
            found = [results[row]["providers"][way] for row in rows]
            reach = [figures[key] * _spread(figures, key) for figures in found]
            if rows:
                values = [figures[key] for figures in found]
                axes.errorbar(values, rows, xerr=reach, fmt="o", markersize=5, color=color, label=title)
        axes.set_yticks(range(len(results)), [_gain(result, key) for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        ticks = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axes.set_xlim(low, high)
        words = f"{time}, µs, {where}; bars: half the range of the turns"
        figure.supxlabel(f"{words}\nnames: model, tokens, speed-up over the fastest other way", size=9)
        return _finish(figure, axes, len(axes.get_legend_handles_labels()[1]))

    save(path, draw)


def _gain(result: dict, key: str) -> str:
    others = [figures[key] for way, figures in result["providers"].items() if not way.startswith("ours")]
    routing = "" if result["routing"] == "balanced" else f" {result['routing']}"
    name = f"{SHORT.get(result['name'], result['name'])}, {result['tokens']}{routing}"
    name += " trained" if result["backward"] else ""
    return f"{name}\n{min(others) / result['providers']['ours'][key]:.2f}x"


# LoRA.

ADAPTED = {
    "compile": "torch.compile",
    "ours": "fused-mlp",
    "ours-recompute": "recomputing",
    "ours-base": "without adapters",
    "gemms": "GEMMs alone",
}
PARTS = {"mlp": "MLP", "inference": "inference", "step": "step"}
PARTS |= {part: part for part in ("experts", "experts in inference")}


def adapters(results: list[dict], where: str, path: Path) -> None:
    """Draws for each case the time of each way, relative to eager's."""
    results = [result for result in results if len(result["providers"]) > 1 and "eager" in result["providers"]]

    def draw() -> plt.Figure:
        figure, axes = plt.subplots(figsize=(WIDTH, 1.5 + 0.4 * len(results)), layout="constrained")
        for color, (way, title) in zip(COLORS, ADAPTED.items(), strict=False):
            rows = [row for row, result in enumerate(results) if way in result["providers"]]
            ratios, reach = [], []
            for row in rows:
                key, base = time_of(results[row]), results[row]["providers"]["eager"]
                figures = results[row]["providers"][way]
                ratios.append(figures[key] / base[key])
                reach.append(ratios[-1] * (_spread(figures, key) + _spread(base, key)))
            if rows:
                axes.errorbar(ratios, rows, xerr=reach, fmt="o", markersize=4, color=color, label=title)
        axes.set_yticks(range(len(results)), [case_of(result).replace(": ", "\n") for result in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.set_xlim(left=0.0)
        figure.supxlabel(f"time, 1 = eager's, {where}\nbars: half the range of the turns of both", size=9)
        return _finish(figure, axes, 2)

    save(path, draw)


def time_of(result: dict) -> str:
    """The relevant time: GPU time for an MLP, in graphs for inference, and wall time for a step."""
    measured = result["providers"]["eager"]
    wanted = ("wall_us",) if result["part"] == "step" else ("graph_us", "kernel_us", "wall_us")
    return next(key for key in wanted if key in measured)


def case_of(result: dict) -> str:
    shape = list(result["shape"])
    sizes = f"{' x '.join(map(str, shape[:3]))}{f', rank {shape[3]}' if len(shape) > 3 else ' tokens'}"
    return f"{PARTS[result['part']]}, {sizes}: {result['adapters']}"


# 4-bit weights.


def quantised_case(result: dict) -> str:
    return f"{' x '.join(map(str, result['shape']))}: {result['format']}"


def quantised(results: list[dict], where: str, path: Path) -> None:
    """Draws times and speed-ups by rows, for the first width and format."""
    results = [result for result in results if "eager" in result["providers"]]
    if not results:
        return
    first = (*results[0]["shape"][1:], results[0]["format"])
    results = [result for result in results if (*result["shape"][1:], result["format"]) == first]
    measured = results[0]["providers"]
    key = next(key for key in ("graph_us", "thread_us", "wall_us") if key in measured["eager"])
    title = f"A gated MLP of {first[0]} x {first[1]} in {first[2]}, {where}\neager: bitsandbytes' modules"
    names = [name for name in measured if name != "eager" and all(name in each["providers"] for each in results)]
    over_rows(*lines_of(results, key, names), title, path)


def _finish(figure: plt.Figure, axes: Axes, columns: int) -> plt.Figure:
    axes.grid(True, axis="x", linewidth=0.5)
    axes.set_axisbelow(True)
    if axes.get_xscale() == "linear":
        axes.axvline(1.0, color=matplotlib.rcParams["text.color"], linewidth=1)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns, frameon=False)
    return figure


# The plots of the documents.

WIDTHS = [(768, 3072), (2048, 16384), (4096, 14336)]


def stored(name: str) -> list[dict]:
    (path,) = RESULTS.rglob(f"{name}.json")
    return json.loads(path.read_text())["results"]


def main() -> None:
    compiled = {(each["model"], each["size"]): each for each in stored("h200-models-compiled")}
    results = []
    for result in stored("h200-models"):
        other = compiled.get((result["model"], result["size"]), {"variants": {}, "ratios": {}})
        results.append(result | {key: result[key] | other[key] for key in ("variants", "ratios")})
    models(results, "H200", IMAGES / "models")

    title = "A gated MLP in CUDA graphs, H200, bfloat16\nbars: half the range of the turns"
    over_rows(*by_width(stored("h200-sweep-graphs"), "graph_us", WIDTHS), title, IMAGES / "rows")

    experts([each for each in stored("h200-experts") if each["routing"] == "balanced"], "H200", IMAGES / "experts")

    adapters(stored("h200-adapters"), "H200", IMAGES / "adapters")
    quantised(stored("h200-quantised"), "H200", IMAGES / "quantised")


if __name__ == "__main__":
    main()
