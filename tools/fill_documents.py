#!/usr/bin/env python3
"""Fills README.md, docs/performance.md and the READMEs of cuda/ from what was measured (benchmarks/results,
profiling/results) and counted (docs/coverage.md), so that no figure in their tables is copied by hand.
"""

import argparse
import itertools
import json
import re
import statistics
import textwrap

import documents
import project

PLACES = ("README.md", "docs/performance.md", "cuda/README.md", "cuda/sm80/README.md")
DOCUMENTS = [project.ROOT / place for place in PLACES]
RESULTS = project.ROOT / "benchmarks/results"
CPU_PROFILE = project.ROOT / "profiling/results/cpu.json"
COVERAGE = project.ROOT / "docs/coverage.md"


HEADS = {
    "compile": "torch.compile",
    "compile-max": "max-autotune",
    "liger": "Liger",
    "quack": "QuACK",
    "gemms": "cuBLAS GEMMs alone",
    "gemm": "cuBLAS GEMM alone",
    "gate-up-gemm": "cuBLAS, packed",
    "addmm-activation": "cuBLASLt GELU_BIAS",
    "ours": "**fused-mlp**",
    "ours-erf": "**fused-mlp**, erf",
    "ours-gated": "**fused-mlp**, gated",
    "ours-triton": "ours, Triton",
    "ours-backward": "**fused-mlp**, backward",
    "eager-backward": "eager, backward",
}
KEYS = {"wall": "wall_us", "CPU": "cpu_us"}  # and GPU time where a column names neither
# The name of a part: the run, what its shapes are called, the columns: a provider, which time, and after the stroke the
# provider that its ratio in brackets is to.
TABLES = {
    "mlp": (
        "h100-mlp",
        "M, D, H",
        "eager; compile / eager; liger / eager; gemms / eager; ours / eager; ours-triton / eager",
    ),
    "mlp-wall": (
        "h100-mlp",
        "M, D, H",
        "eager wall; compile wall / eager; liger wall / eager; ours wall / eager; eager CPU; ours CPU / eager",
    ),
    "gated": ("h100-mlp", "M, D, H", "gate-up-gemm; ours-gated / gate-up-gemm"),
    "compile-max": ("h100-compile-max", "M, D, H", "eager; compile-max / eager; ours / eager"),
    "quack": ("h100-quack", "M, D, H", "eager; quack / eager; ours / eager; quack CPU; ours CPU"),
    "linear": (
        "h100-linear",
        "M, K, N",
        "eager; compile / eager; gemm / eager; addmm-activation / eager; ours / eager; ours-erf / eager",
    ),
    "linear-few-rows": (
        "h100-linear-few-rows",
        "M, K, N",
        "eager; addmm-activation / eager; ours / eager; eager wall; addmm-activation wall / eager; ours wall / eager",
    ),
    "pointwise": (
        "h100-pointwise",
        "M, H",
        "eager; compile / copy; ours / copy; eager-backward; ours-backward / copy-backward",
    ),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made = parts()
    for path in DOCUMENTS:
        path.write_text(documents.fill(path.read_text(), made))


def parts() -> dict[str, str]:
    tables = {name: providers_table(*table) for name, table in TABLES.items()} | {
        "models": models_table("h200-models", "h200-models-compiled"),
        "models-h100": models_table("h100-models"),
        "generate": generate_table("h100-generate"),
        "generate-h200": generate_table("h200-generate"),
        "generate-mixture": generate_table("h200-generate-mixture"),
        "generate-static": generate_table("h200-generate-static"),
        "training": training_table(),
        "widths": widths_table(),
        "floors": floors_table(),
        "experts": experts_table(),
        "gpu-experts": gpu_experts_table(),
        "modules": modules_table(),
        "mma-sync": mma_sync_table(),
    }
    sentences = {
        "machine": machine(),
        "models-machine": models_machine("h200-models"),
        "models-machine-h100": models_machine("h100-models"),
        "training-machine": training_machine(),
        "sweep": sweep_sentence(),
        "between": between_sentence(),
        "sweep-graphs": sweep_graphs_sentence(),
        "between-graphs": between_graphs_sentence(),
        "cpu": cpu_sentence(),
        "modules-machines": modules_machines(),
        "experts-machine": experts_machine(),
        "gpu-experts-machine": gpu_experts_machine(),
        "coverage": coverage_sentence(),
    }
    return tables | {name: textwrap.fill(text, 120) for name, text in sentences.items()}


def run(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def providers_table(name: str, shape: str, columns: str) -> str:
    wanted = [(what.split(), base) for what, _, base in (column.partition(" / ") for column in columns.split("; "))]
    heads = [", ".join([HEADS.get(provider, provider), *which]) for (provider, *which), _ in wanted]
    rows = []
    for result in run(name)["results"]:
        row = [", ".join(map(str, result["shape"]))]
        for (provider, *which), base in wanted:
            key = KEYS[which[0]] if which else "kernel_us"
            time = result["providers"][provider][key]
            row.append(figure(time) + (f" ({time / result['providers'][base][key]:.2f})" if base else ""))
        rows.append(row)
    return documents.table((shape, *heads), rows, left=1)


def machine() -> str:
    facts = run("h100-mlp")["machine"]
    return (
        f"One {facts['gpu']}, {facts['multiprocessors']} multiprocessors, PyTorch {facts['torch']}, {facts['dtype']}, "
        f"GELU tanh. A copy within its memory moves {facts['copy_bandwidth_GBps']} GB/s, read plus written."
    )


# Whole models.

NAMES = {"gemma-2b": "Gemma 2B size", "llama-8b": "Llama 8B size", "qwen3-30b-a3b": "Qwen3 30B-A3B size"}
SETUPS = {
    "eager": "eager",
    "batched_mm": "batched_mm",
    "liger": "Liger",
    "ours": HEADS["ours"],
    "compile": "CUDA graphs by torch.compile",
    "ours + compile": f"{HEADS['ours']} in them",
}


COMPILED = {"compiled": "fused, compiled", "graphs": "fused, in CUDA graphs"}  # by the benchmark's names of the modes


def models_table(name: str, compiled_name: str = "") -> str:
    """Times of the forward of whole models, fused against not; those of compiled models are another run's."""
    found = run(compiled_name)["results"] if compiled_name else []
    compiled = {(each["model"], each["size"]): each for each in found}
    modes = COMPILED if compiled_name else {}
    rows = []
    for result in run(name)["results"]:
        times, others = result["variants"], compiled.get((result["model"], result["size"]), {})
        place = result.get("in_place_us")
        rows.append(
            (
                f"{result['model']}, {result['size']}",
                f"{times['eager']['ms']:.2f} ± {models_spread_of(times):.0f}%",
                models_ratio(result, "eager"),
                f"{place['eager']:.0f} to {place['eager fused']:.0f}" if place else "",
                *(models_ratio(others, mode) for mode in modes),
            )
        )
    heads = ("model, input", "eager, ms", "fused", "CPU time behind attention, us", *modes.values())
    return documents.table(heads, rows, left=1)


def models_ratio(result: dict, mode: str) -> str:
    """That of neighbouring turns, where the run has it; nothing where copies lie further apart than fusing could make
    them.
    """
    times = result.get("variants", {})
    if mode not in times:
        return ""
    original, fused = times[mode], times[f"{mode} fused"]
    ratio = result.get("ratios", {}).get(mode)
    figures = [(ratio, "ratio")] if ratio else [(original, "ms"), (fused, "ms")]
    if any(each["high"] - each["low"] > 0.25 * each[median] for each, median in figures):
        return ""
    return f"{ratio['ratio'] if ratio else fused['ms'] / original['ms']:.2f}"


def models_spread_of(times: dict) -> float:
    """Half of how far the copies of the slower-spread variant lie apart, in percent."""
    return max(50 * (each["high"] - each["low"]) / each["ms"] for each in times.values())


def models_spread(name: str) -> str:
    """The distance between the copies of one variant."""
    variants = [times for result in run(name)["results"] for times in result["variants"].values()]
    spreads = sorted((times["high"] - times["low"]) / times["ms"] for times in variants)
    return f"{100 * spreads[len(spreads) // 2]:.0f}% at the median and {100 * spreads[-1]:.0f}% at most"


def models_machine(name: str) -> str:
    facts = run(name)["machine"]
    libraries = ", ".join(f"{each} {facts[each]}" for each in ("transformers", "diffusers") if each in facts)
    return (
        f"One {facts['gpu']}, PyTorch {facts['torch']}, {libraries}, bfloat16, random weights; at least "
        f"{facts['copies']} copies of each variant in turns, which lie {models_spread(name)} apart. "
        "Ratios below 1 are faster; a ratio is to the same mode without fusing, of runs right after one another."
    )


# Those who train, as far as a run has them: their times, and of some the memory.
TRAINED = ("compile", "liger", "liger-gemm", "liger-tiled", "checkpoint", "quack", "gemms", "ours", "ours-recompute")
KEEPING = ("eager", "liger-tiled", "ours", "ours-recompute")
TRAINED_HEADS = HEADS | {"liger-gemm": "LigerMLP", "liger-tiled": "Liger, tiled", "ours-recompute": "recomputing"}


def training_table() -> str:
    """Eager's GPU and wall time in microseconds and memory in MiB; of the others their parts of these."""
    results = run("h200-training")["results"]
    present = {way for result in results for way in result["providers"]}
    trained, keeping = ([way for way in ways if way in present] for ways in (TRAINED, KEEPING))
    rows = []
    for result in results:
        times = result["providers"]
        if not times:
            continue
        eager, name = times["eager"], f"step of {result['model']}, " if "model" in result else ""
        row = [name + ", ".join(map(str, result["shape"])), f"{eager['kernel_us']:.0f} / {eager['wall_us']:.0f}"]
        for way in trained:
            ratios = (f"{times[way][key] / eager[key]:.2f}" for key in ("kernel_us", "wall_us") if way in times)
            row.append(" / ".join(ratios))
        row += [f"{times[way]['saved']:.0f} / {times[way]['peak']:.0f}" if way in times else "" for way in keeping]
        rows.append(row)
    heads = (TRAINED_HEADS.get(way, way) for way in trained)
    memory = (f"{TRAINED_HEADS.get(way, way)}, MiB" for way in keeping)
    return documents.table(("M, D, H", "eager, us", *heads, *memory), rows, left=1)


def training_machine() -> str:
    facts = run("h200-training")["machine"]
    return (
        f"One {facts['gpu']}, PyTorch {facts['torch']}, bfloat16, SiLU: GPU time / wall time, as parts of eager's; "
        f"memory kept for the backward / at the peak. A copy moves {facts['copy_bandwidth_GBps']} GB/s."
    )


def generate_table(name: str) -> str:
    rows = []
    for result in run(name)["results"]:
        eager = result["setups"]["eager"]
        for key, title in SETUPS.items():
            found = result["setups"].get(key)
            if found is None:
                continue
            where = (NAMES[result["model"]], str(result["batch"])) if key == "eager" else ("", "")
            first = f"{found['ttft_ms']:.1f} ({eager['ttft_ms'] / found['ttft_ms']:.2f})"
            rate = found["tokens_per_second"]
            rows.append((*where, title, first, f"{rate:.0f} ({rate / eager['tokens_per_second']:.2f})"))
    return documents.table(("model", "batch", "set-up", "first token, ms", "tokens/s"), rows, left=3)


# All widths.


def ratios(results: list[dict], key: str) -> list[float]:
    return [result["providers"]["ours"][key] / result["providers"]["eager"][key] for result in results]


def widths_table() -> str:
    """A row a width: medians and extremes over the numbers of rows."""
    by_width: dict[tuple[int, ...], list[dict]] = {}
    for result in run("h100-sweep")["results"]:
        by_width.setdefault(tuple(result["shape"][1:]), []).append(result)
    rows = []
    for width, results in sorted(by_width.items()):
        gpu, wall = ratios(results, "kernel_us"), ratios(results, "wall_us")
        cells = (f"{of(values):.2f}" for values in (gpu, wall) for of in (min, statistics.median, max))
        rows.append((" x ".join(map(str, width)), *cells))
    heads = (f"{kind}, {which}" for kind in ("GPU", "wall") for which in ("best", "median", "worst"))
    return documents.table(("D x H", *heads), rows, left=1)


def sweep_sentence() -> str:
    results = run("h100-sweep")["results"]
    rows = sorted({result["shape"][0] for result in results})
    widths = len({tuple(result["shape"][1:]) for result in results})
    gpu, wall = ratios(results, "kernel_us"), ratios(results, "wall_us")
    return (
        f"Over {len(results)} shapes ({rows[0]} to {rows[-1]} rows, the widths of {widths} models) the fused MLP takes "
        f"{statistics.median(gpu):.2f} of eager's GPU time at the median and {max(gpu):.2f} at worst, and "
        f"{statistics.median(wall):.2f} and {max(wall):.2f} of its wall time."
    )


def sweep_graphs_sentence() -> str:
    runs = [run("h200-sweep-graphs"), run("h100-sweep-graphs")]
    found = {measured["machine"]["gpu"]: ratios(measured["results"], "graph_us") for measured in runs}
    figures = "; ".join(
        f"on an {gpu} {statistics.median(of):.2f} at the median, {max(of):.2f} at worst and over 1 at "
        f"{sum(ratio > 1 for ratio in of) or 'none'} of {len(of)} shapes"
        for gpu, of in found.items()
    )
    return f"In CUDA graphs it takes, of eager's time over the same widths and rows: {figures}."


def between_graphs_sentence() -> str:
    measured = run("h200-between-graphs")
    found = ratios(measured["results"], "graph_us")
    return (
        f"At {len(found)} shapes drawn at random it takes {statistics.median(found):.2f} at the median on an "
        f"{measured['machine']['gpu']}, {max(found):.3f} at worst, and over 1 at "
        f"{sum(ratio > 1 for ratio in found) or 'none'} of them."
    )


def between_sentence() -> str:
    results = run("h100-between")["results"]
    gpu = ratios(results, "kernel_us")
    slower = sum(ratio > 1 for ratio in gpu)
    return (
        f"Over {len(results)} more shapes, at rows and widths between and beside those, GPU time is "
        f"{statistics.median(gpu):.2f} of eager's at the median; it is longer than eager's at {slower} of them, "
        f"{max(gpu):.2f} at worst."
    )


def cpu_sentence() -> str:
    run = json.loads(CPU_PROFILE.read_text())
    (mlp,) = (workload for workload in run["workloads"] if workload["key"] == "mlp")
    shape, facts = mlp["shape"], run["machine"]
    ms = {setup["key"]: setup["wall_us"] / 1e3 for setup in mlp["setups"]}
    return (
        f"{facts['cpu']}, {facts['threads']} threads, {facts['instructions']}, PyTorch {facts['torch']}, "
        f"{run['dtype']}: a gated MLP of {shape['batch'] * shape['seq']} x {shape['dim']} x {shape['hidden']} takes "
        f"{ms['ours']:.0f} ms, eager {ms['eager']:.0f} and torch.compile {ms['compile']:.0f}."
    )


# Experts of mixtures.

EXPERTS = {"eager": "eager", "grouped_mm": "grouped_mm", "batched_mm": "batched_mm", "ours": HEADS["ours"]}


def experts_table() -> str:
    """Ratios to the best of transformers' ways."""
    rows = []
    for result in run("cpu-experts")["results"]:
        times = {name: figures["wall_us"] for name, figures in result["providers"].items()}
        best = min(time for name, time in times.items() if name != "ours")
        cells = (f"{times[name] / best:.2f}" if name in times else "" for name in EXPERTS)
        backward = ", with backward" if result["backward"] else ""
        rows.append((f"{result['tokens']}, {result['routing']}{backward}", *cells))
    return documents.table(("tokens, routing", *EXPERTS.values()), rows, left=1)


# What transformers and Liger run, and what is ours by name: "ours" alone is what a call takes by itself.
GPU_EXPERTS = {
    "grouped_mm": "grouped_mm",
    "batched_mm": "batched_mm",
    "liger": "Liger",
    "ours-triton": "ours, Triton",
    "ours-cuda": "ours, CUDA",
    "ours": HEADS["ours"],
}


def gpu_experts_table() -> str:
    """GPU and wall time in microseconds."""
    results = [result for result in run("h200-experts")["results"] if result["providers"]]
    names = [name for name in GPU_EXPERTS if any(name in result["providers"] for result in results)]
    rows = []
    for result in results:
        times = result["providers"]
        backward = ", with backward" if result["backward"] else ""
        cells = (f"{times[n]['kernel_us']:.0f} / {times[n]['wall_us']:.0f}" if n in times else "" for n in names)
        rows.append((f"{result['name']}, {result['tokens']}, {result['routing']}{backward}", *cells))
    heads = ("experts, tokens, routing", *(GPU_EXPERTS[name] for name in names))
    return documents.table(heads, rows, left=1)


def gpu_experts_machine() -> str:
    found = run("h200-experts")
    shapes = {
        result["name"]: f"{result['name']} has {result['experts']} experts of {result['dim']} x {result['hidden']}, "
        f"{result['top_k']} a token"
        for result in found["results"]
    }
    spreads = [way["wall_us_spread"] for result in found["results"] for way in result["providers"].values()]
    facts = found["machine"]
    return (
        f"{facts['gpu']}, PyTorch {facts['torch']}, transformers {facts['transformers']}, {facts['dtype']}: GPU / wall "
        f"time in us; the turns of one way differ by {statistics.median(spreads):.1%} of their median wall time. "
        f"{'; '.join(shapes.values())}."
    )


def experts_machine() -> str:
    found = run("cpu-experts")
    facts, shape = found["machine"], found["results"][0]
    spreads = [way["wall_us_spread"] for result in found["results"] for way in result["providers"].values()]
    return (
        f"{facts['cpu']}, {facts['threads']} threads, {facts['instructions']}, PyTorch {facts['torch']}, transformers "
        f"{facts['transformers']}, {facts['dtype']}: {shape['experts']} experts of {shape['dim']} x {shape['hidden']}, "
        f"{shape['top_k']} a token. Wall time as a part of the best of transformers' ways. The machine was busy with "
        f"other work: the turns of one way differ by {statistics.median(spreads):.0%} of their median, and the times "
        "themselves say nothing."
    )


def mma_sync_table() -> str:
    """The GEMMs of sm_80 on a Hopper GPU, with what else multiplies by mma.sync there."""
    rows = []
    for entry in run("h200-mma-sync")["found"]:
        us = entry.get("us", {})
        if "TFLOPs" in entry:
            continue
        if "cublaslt" in us:
            shown = f"{us['ours'] / us['cublaslt']:.2f} of cuBLASLt's, {entry['share_of_peak']['ours']:.0%} of the peak"
        elif "share_of_bandwidth" in entry:
            shown = f"{entry['share_of_bandwidth']:.0%} of the bandwidth"
        else:
            shown = f"{entry['ratio']:.2f}"
        times = (figure(us[name]) if name in us else "" for name in ("ours", "cublaslt", "triton", "reading"))
        rows.append((entry["what"] + (" (another run)" if "run" in entry else ""), *times, shown))
    heads = ("M and sizes", "ours, us", "cuBLASLt, us", "Triton, us", "reading, us", "ratio, share")
    return documents.table(heads, rows, left=1)


# The least that a gated MLP can take.

FLOPS_PER_US, BYTES_PER_US = 800e6, 3.0e6


def floors_table() -> str:
    rows = []
    for m, d, h in (result["shape"] for result in run("h100-mlp")["results"]):
        cells, least = [], 0.0
        # Rows in, rows out and weights of the two kernels, in elements of two bytes.
        for flops, elements in ((4 * m * d * h, m * d + 2 * d * h + m * h), (2 * m * d * h, m * h + d * h + m * d)):
            arithmetic, moved = flops / FLOPS_PER_US, 2 * elements / BYTES_PER_US
            cells.append(f"{max(arithmetic, moved):.0f}, {'arithmetic' if arithmetic > moved else 'bytes'}")
            least += max(arithmetic, moved)
        rows.append((f"{m}, {d}, {h}", *cells, f"{least:.0f}", f"{10 * m * h / BYTES_PER_US:.0f}"))
    return documents.table(("M, D, H", "gate and up", "down", "floor", "pointwise kernels of eager"), rows, left=1)


# MLPs of random kinds and sizes, as modules on CPUs.

MODULES = {"Intel": "xeon-modules", "AMD": "epyc-modules"}
ROWS = ((1, 15), (16, 127), (128, 2048))


def modules_table() -> str:
    """By dtype, way and machine: medians of the ratios, by number of rows and of all; how many are losses."""
    rows = []
    for dtype, way in itertools.product(("float32", "bfloat16"), ("inference", "training")):
        for maker, name in MODULES.items():
            of = [each for each in run(name)["results"] if (each["dtype"], each["way"]) == (dtype, way)]
            medians = [statistics.median(ratios_of(of, *bounds)) for bounds in (*ROWS, (1, 2048))]
            high = ratios_of(of, 1, 2048)[int(0.95 * len(of))]
            losses = sum(min(each["ratios"]) > 1.05 for each in of)
            rows.append(
                (f"{dtype}, {way}", maker, *(f"{cell:.2f}" for cell in (*medians, high)), f"{losses} of {len(of)}")
            )
    heads = ("", "CPU", *(f"{low} to {high} rows" for low, high in ROWS), "all", "95%", "above 1.05, twice")
    return documents.table(heads, rows, left=2)


def ratios_of(points: list[dict], low: int, high: int) -> list[float]:
    return sorted(each["ratios"][0] for each in points if low <= each["rows"] <= high)


def modules_machines() -> str:
    facts = {maker: run(name)["machine"] for maker, name in MODULES.items()}
    words = [
        f"{maker}: {each['cpu']}, {each['threads']} threads, {each['instructions']}, a copy of "
        f"{each['copy_bandwidth_GBps']} GB/s, PyTorch {each['torch']}"
        for maker, each in facts.items()
    ]
    return f"{'; '.join(words)}. Medians of the fused module's time as a part of the original's."


# Models that fuse_mlps takes.


def coverage_sentence() -> str:
    text = COVERAGE.read_text()
    version = re.search(r"type in transformers\s+(\S+) \(", text)[1]

    def counts(kind: str) -> list[int]:
        return [
            int(cell)
            for cell in re.search(rf"^\| {kind} \|(.*)\|[^|]*\|$", text, re.MULTILINE)[1].split("|")
            if cell.strip()
        ]

    types, total, fused, pointwise, _ = counts("all of these")
    experts, experts_fused, experts_pointwise, _ = counts("MoE experts")
    return (
        f"Of the {total} MLPs in the {types} model types of transformers {version} that can be built from a "
        f"configuration, {fused / total:.1%} are fused, GEMMs included, and {(fused + pointwise) / total:.1%} with "
        f"those of which only `act(gate) * up` is. Groups of experts are counted apart: of {experts}, "
        f"{experts_fused / experts:.1%} are fused as a whole on a CPU, and {experts_pointwise} in the product alone."
    )


if __name__ == "__main__":
    main()
