#!/usr/bin/env python3
"""Fills README.md, CARD.md, docs/performance.md and the READMEs of cuda/ with measured (benchmarks/results,
profiling/results) and counted (docs/coverage.md) figures, so that none in their tables is copied by hand.
"""

import argparse
import itertools
import json
import re
import statistics
import textwrap

import documents
import project

PLACES = ("README.md", "CARD.md", "docs/performance.md", "cuda/README.md", "cuda/sm80/README.md")
DOCUMENTS = [project.ROOT / place for place in PLACES]
RESULTS = project.ROOT / "benchmarks/results"
CPU_PROFILE = project.ROOT / "profiling/results/cpu.json"
COVERAGE = project.ROOT / "docs/coverage.md"


HEADS = {
    "compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "gemms": "cuBLAS GEMMs alone",
    "gemm": "cuBLAS GEMM alone",
    "addmm-activation": "cuBLASLt GELU_BIAS",
    "copy": "a copy",
    "ours": "**fused-mlp**",
    "eager-backward": "eager, backward",
    "ours-backward": "**fused-mlp**, backward",
}
# The name of a part: the run, the label of its shapes, and the columns: a provider, and after the slash the provider
# that the speed-up in brackets is relative to.
TABLES = {
    "mlp": ("h100-mlp", "M, D, H", "eager; compile / eager; liger / eager; gemms / eager; ours / eager"),
    "quack": ("h100-quack", "M, D, H", "eager; quack / eager; ours / eager"),
    "linear": (
        "h100-linear",
        "M, K, N",
        "eager; compile / eager; addmm-activation / eager; gemm / eager; ours / eager",
    ),
    "pointwise": (
        "h100-pointwise",
        "M, H",
        "copy; eager; compile / eager; ours / eager; eager-backward; ours-backward / eager-backward",
    ),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made = parts()
    for path in DOCUMENTS:
        path.write_text(documents.fill(path.read_text(), made))


def parts() -> dict[str, str]:
    tables = {name: providers_table(*table) for name, table in TABLES.items()} | {
        "expect": expect_table(),
        "models": models_table(),
        "generate": generate_table(),
        "training": training_table(),
        "training-steps": training_steps_table(),
        "adapters": adapters_table(),
        "quantised": quantised_table(QUANTISED),
        "quantised-fp8": quantised_table(FP8),
        "quantised-fp8-layers": quantised_table(FP8_LAYERS),
        "quantised-integers": quantised_table(INTEGERS),
        "quantised-cpu": quantised_table(CODES_ON_CPU),
        "quantised-models": quantised_models_table(),
        "quantised-experts": quantised_experts_table(),
        "unfused": unfused_table(),
        "floors": floors_table(),
        "experts": experts_table(),
        "gpu-experts": gpu_experts_table(),
        "modules": modules_table(),
        "sweep": sweep_table(),
        "cpu": cpu_table(),
        "mma-sync": mma_sync_table(),
    }
    sentences = {
        "machine": machine(),
        "models-machine": models_machine(),
        "generate-spread": generate_spread(),
        "training-machine": training_machine(),
        "adapters-machine": adapters_machine(),
        "quantised-machine": quantised_machine(QUANTISED),
        "quantised-fp8-machine": quantised_machine(FP8),
        "quantised-fp8-layers-machine": quantised_machine(FP8_LAYERS),
        "quantised-integers-machine": quantised_machine(INTEGERS),
        "quantised-cpu-machine": quantised_machine(CODES_ON_CPU),
        "quantised-models-machine": quantised_models_machine(),
        "modules-machines": modules_machines(),
        "experts-machine": experts_machine(),
        "gpu-experts-machine": gpu_experts_machine(),
        "coverage": coverage_sentence(),
    }
    return tables | {name: textwrap.fill(text, 120) for name, text in sentences.items()}


def run(name: str) -> dict:
    (path,) = RESULTS.rglob(f"{name}.json")
    return json.loads(path.read_text())


def figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def gain(*speedups: float) -> str:
    """A speed-up, or the smallest and the greatest of several."""
    low, high = (f"{of(speedups):.2f}" for of in (min, max))
    return f"{high}x" if low == high else f"{low}-{high}x"


def providers_table(name: str, shape: str, columns: str) -> str:
    """GPU time in microseconds."""
    wanted = [(provider, base) for provider, _, base in (column.partition(" / ") for column in columns.split("; "))]
    rows = []
    for result in run(name)["results"]:
        us = {provider: figures["kernel_us"] for provider, figures in result["providers"].items()}
        cells = (figure(us[of]) + (f" ({gain(us[base] / us[of])})" if base else "") for of, base in wanted)
        rows.append((", ".join(map(str, result["shape"])), *cells))
    return documents.table((shape, *(HEADS.get(of, of) for of, _ in wanted)), rows, left=1)


def machine() -> str:
    facts = run("h100-mlp")["machine"]
    return (
        f"One {facts['gpu']}, {facts['multiprocessors']} multiprocessors, PyTorch {facts['torch']}, {facts['dtype']}, "
        f"GELU tanh. A copy within its memory moves {facts['copy_bandwidth_GBps']} GB/s, read plus written."
    )


# The table of speed-ups per situation.

GROUPS = {
    "BERT, MiniLM (sentence embeddings)": ("minilm", "bert-base"),
    "ViT, DINOv2, Whisper's encoder": ("vit-b/16", "dinov2-base", "whisper-base encoder"),
    "T5's encoder": ("flan-t5-base encoder",),
    "GPT-2, Llama 1B, Gemma 2B": ("gpt2", "llama-1b", "gemma-2b", "gemma-2-2b"),
    "diffusion transformers: SD 3, PixArt": ("sd3-medium", "pixart-alpha"),
    "a UNet: Stable Diffusion 1.5": ("sd-1.5 unet",),
}
# Rows of hardware that never ran the kernels.
NEVER_RUN = {
    "A100, L4, L40S, RTX, B200": "mostly cuBLAS and one pointwise kernel",
    "AMD's and Intel's GPUs": "PyTorch; Triton on request",
}


def expect_table() -> str:
    """Speed-ups by workload, with the modes side by side."""
    found = models()
    rows = []
    for title, names in GROUPS.items():
        of = [result for result in found if result["model"] in names]
        cells = ([speedup for each in of if (speedup := models_speedup(each, mode))] for mode in MODES)
        rows.append((title, *(gain(*cell) if cell else "" for cell in cells)))

    eager, graphs = generate_gains("h200-generate")[0], generate_gains("h100-generate")[1]
    rows.append(("`generate`: Gemma 2B, Llama 8B", gain(*eager), "", f"{gain(*graphs)} (H100)"))
    eager, graphs = generate_gains("h200-generate-mixture")
    rows.append(("`generate`: Qwen3 30B-A3B, 8 layers", gain(*eager), "", gain(*graphs)))
    eager, graphs = quantised_models_gains("nf4")
    rows.append(("decoding: Llama 8B in NF4, 8 layers, over bitsandbytes", gain(*eager), "", gain(*graphs)))
    rows += [(what, steps_gain(found), compiled_steps_gain(what), "") for what, found in training_gains().items()]
    rows += [(what, "", "", gain(*found)) for what, found in gains_of_codes().items()]

    for title, dtype, maker in (
        ("bfloat16 MLP, Xeon with AMX", "bfloat16", "Intel"),
        ("float32 MLP, the same Xeon", "float32", "Intel"),
        ("float32 MLP, EPYC (Zen 5)", "float32", "AMD"),
    ):
        inference, trained = (
            1 / statistics.median(module_ratios(maker, dtype, way)) for way in ("inference", "training")
        )
        rows.append((title, f"{gain(inference)}; training {gain(trained)}", "", ""))
    for kind in ("nf4", "int8"):
        gains = quantised_gains(CODES_ON_CPU, kind, 64)
        rows.append(
            (f"{kind.upper() if kind == 'nf4' else kind} MLP, Xeon, 1-64 rows, over bitsandbytes", gain(*gains), "", "")
        )
    rows += [(what, f"never run: {words}", "", "") for what, words in NEVER_RUN.items()]
    return documents.table(("you run, on an H200 unless named", *MODES.values()), rows, left=4)


STEPS = "h200-training-steps"
TRAINED = {
    "training: BERT-base, ViT-B, GPT-2": ("bert", "vit", "gpt2"),
    "training: Llama 1B's widths, 4 layers": ("llama-1b",),
}


def training_gains() -> dict[str, list[tuple[float, float]]]:
    """Ratios to eager's wall time and peak memory."""
    steps = {each["model"]: of_eager(each) for each in run(STEPS)["results"] if "note" not in each}
    adapted = run(ADAPTERS)["results"]
    return {
        **{what: [steps[model] for model in found] for what, found in TRAINED.items()},
        "training: Llama with LoRA": [of_eager(each) for each in adapted if each["part"] == "step"],
        "training: QLoRA, Llama 1B, 4 layers, over PEFT": [
            of_eager(each) for each in run(QUANTISED_MODELS)["results"] if each["shape"][0] == "qlora"
        ],
        "training: LoRA on experts, over PEFT": [of_eager(each) for each in adapted if each["part"] == "experts"],
    }


def compiled_steps_gain(what: str) -> str:
    """Speed-ups over the same steps with torch.compile."""
    steps = [each["providers"] for each in run(STEPS)["results"] if each["model"] in TRAINED.get(what, ())]
    found = [each["compile"]["wall_us"] / each["compile-ours"]["wall_us"] for each in steps if "compile-ours" in each]
    return gain(*found) if found else ""


def of_eager(result: dict) -> tuple[float, float]:
    eager, ours = (result["providers"][way] for way in ("eager", "ours"))
    return ours["wall_us"] / eager["wall_us"], ours["peak"] / eager["peak"]


def steps_gain(found: list[tuple[float, float]]) -> str:
    times, peaks = zip(*found, strict=True)
    least, most = (f"{of(peaks):.0%}" for of in (min, max))
    return f"{gain(*(1 / time for time in times))}; memory {least if least == most else f'{least[:-1]}-{most}'}"


def gains_of_codes() -> dict[str, list[float]]:
    return {
        "NF4 MLP, 1-64 rows, over bitsandbytes": quantised_gains(QUANTISED, "nf4", 64),
        "int8 MLP, 1-64 rows, over bitsandbytes": quantised_gains(INTEGERS, "int8", 64),
        "FP8 MLP, over transformers' and torchao's layers": [
            each
            for kind in ("fp8-linear", "fp8-compressed-tensors", "fp8-torchao")
            for each in quantised_gains(FP8_LAYERS, kind, 8192)
        ],
        "FP8 experts, 1-128 tokens, over bfloat16 ones": quantised_experts_gains("fp8"),
    }


# Whole models.

MODES = {"eager": "eager", "compiled": "compiled", "graphs": "CUDA graphs"}  # by the benchmark's names


def models() -> list[dict]:
    """The results of the eager run, with another run's compiled results of the same models."""
    compiled = {(each["model"], each["size"]): each for each in run("h200-models-compiled")["results"]}
    found = []
    for result in run("h200-models")["results"]:
        other = compiled.get((result["model"], result["size"]), {"variants": {}, "ratios": {}})
        found.append(result | {key: result[key] | other[key] for key in ("variants", "ratios")})
    return found


def models_table() -> str:
    """The unfused time in milliseconds and the speed-up, in each mode."""
    rows = []
    for result in models():
        cells = [f"{result['model']}, {result['size']}"]
        for mode in MODES:
            original, speedup = result["variants"].get(mode), models_speedup(result, mode)
            spread = max(map(half_range, (original, result["variants"][f"{mode} fused"]))) if original else 0
            cells += [f"{original['ms']:.2f} ± {spread:.0%}" if original else "", gain(speedup) if speedup else ""]
        rows.append(cells)
    heads = (head for title in MODES.values() for head in (f"{title}, ms", "fused"))
    return documents.table(("model, input", *heads), rows, left=1)


def spread_of(spreads: list[float]) -> str:
    return f"median spread ±{statistics.median(spreads):.0%}, at most ±{max(spreads):.0%}"


def half_range(times: dict) -> float:
    return (times["high"] - times["low"]) / times["ms"] / 2


def models_speedup(result: dict, mode: str) -> float | None:
    """The speed-up, or None if copies differ by more than fusing could explain, or nothing was measured."""
    ratio = result["ratios"].get(mode)
    if ratio is None or ratio["high"] - ratio["low"] > 0.25 * ratio["ratio"]:
        return None
    return 1 / ratio["ratio"]


def models_machine() -> str:
    facts = run("h200-models")["machine"]
    spreads = [half_range(times) for result in models() for times in result["variants"].values()]
    return (
        f"{facts['gpu']}, PyTorch {facts['torch']}, transformers {facts['transformers']}, diffusers "
        f"{facts['diffusers']}, bfloat16, random weights, {facts['copies']} copies of each variant; "
        f"{spread_of(spreads)}."
    )


GENERATED = ("h200-generate", "h100-generate", "h200-generate-mixture")


def generate_spread() -> str:
    ways = [way for name in GENERATED for result in run(name)["results"] for way in result["setups"].values()]
    spreads = [way["tokens_per_second_spread"] / 2 for way in ways if "tokens_per_second_spread" in way]
    return f"On the H200 {spread_of(spreads)}; on the H100 no spread was recorded."


def generate_gains(name: str) -> tuple[list[float], list[float]]:
    """Gains in tokens a second: in eager mode, and with a static cache in CUDA graphs."""
    eager, graphs = [], []
    for result in run(name)["results"]:
        rates = {way: figures["tokens_per_second"] for way, figures in result["setups"].items()}
        eager.append(rates["ours"] / rates["eager"])
        graphs += [rates["ours + compile"] / rates["compile"]] if "compile" in rates else []
    return eager, graphs


def generate_table() -> str:
    rows = []
    for name in GENERATED:
        found = run(name)
        for result in found["results"]:
            ways = result["setups"]
            rates = {way: figures["tokens_per_second"] for way, figures in ways.items()}
            first = {way: figures["ttft_ms"] for way, figures in ways.items()}
            rows.append(
                (
                    f"{result['model']}, {result['layers']} layers",
                    str(result["batch"]),
                    found["machine"]["gpu"].split()[1],
                    f"{first['eager']:.1f}",
                    gain(first["eager"] / first["ours"]),
                    figure(rates["eager"]),
                    gain(rates["liger"] / rates["eager"]) if "liger" in rates else "",
                    gain(rates["ours"] / rates["eager"]),
                    figure(rates["compile"]) if "compile" in rates else "",
                    gain(rates["ours + compile"] / rates["compile"]) if "compile" in rates else "",
                )
            )
    heads = ("first token, eager, ms", "fused", "tokens/s, eager", "Liger", "fused", "in CUDA graphs", "fused in them")
    return documents.table(("model", "batch", "GPU", *heads), rows, left=1)


def training_table() -> str:
    """Eager's wall time and peak memory; speed-ups over it, and ratios to its memory."""
    rows = []
    for result in run("h200-training")["results"]:
        times = result["providers"]
        if not times:
            continue
        name = f"step of {result['model']}, " if "model" in result else ""
        eager, ways = times["eager"], ("compile", "liger", "ours", "ours-recompute")
        gains = (gain(eager["wall_us"] / times[way]["wall_us"]) if way in times else "" for way in ways)
        memory = (f"{times[way]['peak'] / eager['peak']:.0%}" for way in ("ours", "ours-recompute"))
        row = (name + ", ".join(map(str, result["shape"])), f"{eager['wall_us'] / 1e3:.2f}", *gains)
        rows.append((*row, f"{eager['peak']:.0f}", *memory))
    heads = ("torch.compile", "Liger", "**fused-mlp**", "recomputing", "peak, MiB", "**fused-mlp**", "recomputing")
    return documents.table(("M, D, H", "eager, ms", *heads), rows, left=1)


STEP_TITLES = {  # of benchmarks/training/training_steps.py
    "llama-1b": "Llama 1B's widths, 4 layers",
    "llama-8b": "Llama 8B's widths, 2 layers",
    "gpt2": "GPT-2",
    "bert": "BERT-base",
    "vit": "ViT-B",
}
STEP_WAYS = {
    "eager": "eager",
    "ours": HEADS["ours"],
    "liger-swiglu": "Liger's MLP",
    "liger": "Liger's MLP and norms",
    "compile": "torch.compile",
    "compile-ours": "fused, then compiled",
}


def training_steps_table() -> str:
    """Whole steps: the GPU's busy time, kernels, wall time and peak memory of each way, and ratios to eager's."""
    rows = []
    for result in run(STEPS)["results"]:
        eager = result["providers"]["eager"]
        title = f"{STEP_TITLES[result['model']]}, {' x '.join(map(str, result['shape']))}"
        title += f", {result['note']}" if "note" in result else ""
        for way, of in result["providers"].items():
            gpu, wall = (f"{of[key] / 1e3:.1f} ({of[key] / eager[key]:.2f})" for key in ("kernel_us", "wall_us"))
            spread = f"± {of['wall_us_spread'] / 2:.0%}"
            rows.append((title, STEP_WAYS[way], gpu, f"{of['kernels']:.0f}", wall, spread, f"{of['peak']:.0f}"))
            title = ""
    heads = ("step", "way", "GPU busy, ms (of eager)", "kernels", "wall, ms (of eager)", "", "peak, MiB")
    return documents.table(heads, rows, left=2)


def training_machine() -> str:
    facts = run("h200-training")["machine"]
    spreads = [
        way["wall_us_spread"] / 2 for each in run("h200-training")["results"] for way in each["providers"].values()
    ]
    return f"{facts['gpu']}, PyTorch {facts['torch']}, bfloat16, SiLU, wall time; {spread_of(spreads)}."


# LoRA.

ADAPTERS = "h200-adapters"
ADAPTED = {"compile": "torch.compile", "ours": HEADS["ours"], "ours-recompute": "recomputing"}
ADAPTED |= {"ours-base": "without adapters", "gemms": "GEMMs alone"}
ADAPTED_PARTS = ("mlp", "inference", "step", "experts", "experts in inference")


def adapters_time(result: dict) -> str:
    """The relevant time: in graphs for inference, wall time for a step, otherwise GPU time."""
    return {"inference": "graph_us", "step": "wall_us"}.get(result["part"], "kernel_us")


def adapters_table() -> str:
    """Eager's time and peak memory; speed-ups over it, and the ratio of our memory to its."""
    rows = []
    timed = [(each, adapters_time(each), "") for each in run(ADAPTERS)["results"] if each["providers"]]
    timed += [(each, "kernel_us", ", GPU time") for each, key, _ in timed if key == "wall_us"]
    for result, key, words in sorted(timed, key=lambda each: ADAPTED_PARTS.index(each[0]["part"])):
        times = result["providers"]
        eager = times["eager"]
        gains = (gain(eager[key] / times[way][key]) if way in times else "" for way in ADAPTED)
        memory = (
            [f"{eager['peak']:.0f}", f"{times['ours']['peak'] / eager['peak']:.0%}"] if "peak" in eager else ["", ""]
        )
        what = "" if result["part"] == "mlp" else f"{result['part']}, "
        case = f"{what}{', '.join(map(str, result['shape']))}: {result['adapters']}{words}"
        rows.append((case, f"{eager[key] / 1e3:.2f}", *gains, *memory))
    heads = ("M, D, H, rank: adapters", "eager, ms", *ADAPTED.values(), "peak, MiB", HEADS["ours"])
    return documents.table(heads, rows, left=1)


def adapters_machine() -> str:
    found = run(ADAPTERS)
    facts = found["machine"]
    spreads = [
        way[f"{adapters_time(each)}_spread"] / 2 for each in found["results"] for way in each["providers"].values()
    ]
    return (
        f"{facts['gpu']}, PyTorch {facts['torch']}, PEFT {facts['peft']}, transformers {facts['transformers']}, "
        f"bfloat16, SiLU; GPU time (inference in CUDA graphs, steps in wall time); {spread_of(spreads)}."
    )


# Quantised weights.

QUANTISED, FP8, INTEGERS = "h200-quantised", "h200-fp8", "h200-integers"
FP8_LAYERS = "h200-fp8-layers"
CODES_ON_CPU = "xeon-quantised"


def quantised_results(name: str) -> list[dict]:
    """The results of cases that the other way supports and that both ran."""
    return [result for result in run(name)["results"] if {"eager", "ours"} <= result["providers"].keys()]


def quantised_gains(name: str, kind: str, most_rows: int) -> list[float]:
    """Speed-ups at few rows."""
    found = [each for each in quantised_results(name) if each["format"] == kind and each["shape"][0] <= most_rows]
    key = time_of(name)
    return [each["providers"]["eager"][key] / each["providers"]["ours"][key] for each in found]


def time_of(name: str) -> str:
    return "thread_us" if name == CODES_ON_CPU else "graph_us"


def quantised_table(name: str) -> str:
    """A line per width and format, a column per number of rows: our time, and the speed-up."""
    lines: dict[str, dict[int, str]] = {}
    for result in quantised_results(name):
        rows, *width = result["shape"]
        times = {way: figures[time_of(name)] for way, figures in result["providers"].items()}
        cells = {way: f"{time:.0f} ({gain(times['eager'] / time)})" for way, time in times.items()}
        sizes = ", ".join(map(str, width))
        lines.setdefault(f"{sizes}: {result['format']}", {})[rows] = cells["ours"]
        if "ours-bf16" in cells:
            lines.setdefault(f"{sizes}: bfloat16", {}).setdefault(rows, cells["ours-bf16"])
    counts = sorted({rows for line in lines.values() for rows in line})
    table = [(head, *(line.get(rows, "") for rows in counts)) for head, line in lines.items()]
    return documents.table(("D, H: weights", *map(str, counts)), table, left=1)


def quantised_machine(name: str) -> str:
    found = run(name)
    facts = found["machine"]
    key = f"{time_of(name)}_spread"
    spreads = [way[key] / 2 for each in found["results"] for way in each["providers"].values()]
    libraries = {FP8: (), FP8_LAYERS: ("transformers",)}.get(name, ("bitsandbytes",))
    library = "".join(f"{each} {facts[each]}, " for each in libraries)
    return (
        f"{facts.get('gpu') or facts['cpu']}, PyTorch {facts['torch']}, {library}SiLU, bfloat16 rows, "
        f"{'in CUDA graphs' if 'gpu' in facts else 'CPU time of one thread'}; "
        f"{spread_of(spreads)}."
    )


QUANTISED_MODELS = "h200-quantised-models"
UNQUANTISED = {"nf4": "bitsandbytes NF4", "fp8-blocks": "decoded FP8"}


def quantised_models_gains(kind: str) -> tuple[list[float], list[float]]:
    """Speed-ups of decoding, in eager mode and in CUDA graphs."""
    found = [each for each in run(QUANTISED_MODELS)["results"] if each["format"] == kind]
    found = [each["providers"] for each in found if each["shape"][0] == "decoding"]
    eager, graphs = ([of["eager"][key] / of["ours"][key] for of in found] for key in ("wall_us", "graph_us"))
    return eager, graphs


def quantised_models_table() -> str:
    """Tokens a second of decoding; the time and the peak memory of a QLoRA step."""
    rows = []
    for result in quantised_results(QUANTISED_MODELS):
        part, batch, *_ = result["shape"]
        ways, kind = result["providers"], UNQUANTISED[result["format"]]
        if part == "qlora":
            eager, ours = ways["eager"], ways["ours"]
            step = f"QLoRA, {kind}, {' x '.join(map(str, result['shape'][1:]))} tokens"
            for key, time in (("wall_us", "wall time"), ("kernel_us", "GPU time")):
                rows.append((f"{step}, {time}", f"{eager[key] / 1e3:.1f} ms", gain(eager[key] / ours[key]), ""))
            rows.append(("its peak of memory, MiB", f"{eager['peak']:.0f}", f"{ours['peak'] / eager['peak']:.0%}", ""))
            continue
        for key, mode in (("wall_us", "eager"), ("graph_us", "CUDA graphs")):
            eager, ours, wide = (ways[name][key] for name in ("eager", "ours", "ours-bf16"))
            cells = f"{1e6 * batch / eager:.0f}", gain(eager / ours), gain(eager / wide)
            rows.append((f"decoding, {kind}, batch {batch}, {mode}", *cells))
    return documents.table(("model", "as it is, tokens/s", HEADS["ours"], "fused bfloat16"), rows, left=1)


def quantised_models_machine() -> str:
    found = run(QUANTISED_MODELS)
    facts = found["machine"]
    ways = [way for each in found["results"] for way in each["providers"].values()]
    walls, graphs = ([way[f"{key}_spread"] / 2 for way in ways if key in way] for key in ("wall_us", "graph_us"))
    return (
        f"{facts['gpu']}, PyTorch {facts['torch']}, bitsandbytes {facts['bitsandbytes']}, transformers "
        f"{facts['transformers']}, PEFT {facts['peft']}; wall time, {spread_of(walls)}, in CUDA graphs "
        f"{spread_of(graphs)}."
    )


EXPERTS_OF_CODES = "h200-quantised-experts"  # by benchmarks/experts/quantised_experts.py


def quantised_experts_gains(kind: str) -> list[float]:
    """Speed-ups over bfloat16 weights at few tokens."""
    found = run(EXPERTS_OF_CODES)["results"]
    return [each["bf16"] / each["ours"] for each in found if each["format"] == kind and each["tokens"] <= 128]


def quantised_experts_table() -> str:
    rows = []
    for result in run(EXPERTS_OF_CODES)["results"]:
        ways = ("ours", "hub", "routed", "hub_routed", "decoded", "bf16", "floor")
        cells = (f"{result[way]:.0f}" if way in result else "" for way in ways)
        rows.append((f"{result['name']} in {result['format'].upper()}, {result['tokens']}", *cells))
    heads = ("experts, tokens", "ours", "Hub", "ours, routed", "Hub, routed", "decoded first", "bf16 weights", "bytes")
    return documents.table(heads, rows, left=1)


# Models that are not fused whole.

UNFUSED = {
    "plain": "plain linear layers: fused whole",
    "hook": "a forward hook on each down projection",
    "nf4": "bitsandbytes NF4",
}


def unfused_points(kind: str) -> dict[int, list[float]]:
    """Speed-ups of all turns, by number of rows."""
    points = (point for point in run("h100-unfused")["points"] if point["kind"] == kind)
    return {point["rows"]: [1 / ratio for ratio in point["ratios"]] for point in points}


def unfused_gains(kind: str) -> list[float]:
    return [statistics.median(speedups) for speedups in unfused_points(kind).values()]


def unfused_table() -> str:
    """Medians, and quartiles in brackets."""
    rows = []
    for kind, title in UNFUSED.items():
        cells = (statistics.quantiles(speedups, n=4) for speedups in unfused_points(kind).values())
        rows.append((title, *(f"{gain(median)} ({low:.2f} to {high:.2f})" for low, median, high in cells)))
    return documents.table(("model", *(f"{rows} rows" for rows in unfused_points("plain"))), rows, left=1)


# All widths.


def sweep_table() -> str:
    """One gated MLP in CUDA graphs, the least flattering mode."""
    rows = []
    for name in ("h200-sweep-graphs", "h100-sweep-graphs", "h200-between-graphs"):
        found = run(name)
        times = [result["providers"] for result in found["results"]]
        speedups = [each["eager"]["graph_us"] / each["ours"]["graph_us"] for each in times]
        spreads = [way["graph_us_spread"] / 2 for each in times for way in each.values()]
        what = "drawn at random" if "between" in name else "of nine models"
        cells = (gain(of(speedups)) for of in (max, statistics.median, min))
        rows.append((f"{len(speedups)} {what}", found["machine"]["gpu"], *cells, f"±{statistics.median(spreads):.1%}"))
    return documents.table(("shapes", "GPU", "best", "median", "worst", "spread, median"), rows, left=2)


def cpu_table() -> str:
    run = json.loads(CPU_PROFILE.read_text())
    (mlp,) = (workload for workload in run["workloads"] if workload["key"] == "mlp")
    shape, facts = mlp["shape"], run["machine"]
    ms = {setup["key"]: setup["wall_us"] / 1e3 for setup in mlp["setups"]}
    machine = f"{facts['cpu']}, {facts['threads']} threads, {facts['instructions']}, PyTorch {facts['torch']}"
    sizes = f"{shape['batch'] * shape['seq']}, {shape['dim']}, {shape['hidden']}"
    gains = (gain(ms["eager"] / ms[way]) for way in ("compile", "ours"))
    row = (machine, run["dtype"], sizes, f"{ms['eager']:.0f}", *gains)
    return documents.table(("CPU", "dtype", "M, D, H", "eager, ms", "torch.compile", HEADS["ours"]), [row], left=3)


# Experts of mixtures.

EXPERTS = {"eager": "eager", "grouped_mm": "grouped_mm", "batched_mm": "batched_mm", "ours": HEADS["ours"]}


def experts_table() -> str:
    """Speed-ups over the best of transformers' ways."""
    rows = []
    for result in run("cpu-experts")["results"]:
        times = {name: figures["wall_us"] for name, figures in result["providers"].items()}
        best = min(time for name, time in times.items() if name != "ours")
        cells = (gain(best / times[name]) if name in times else "" for name in EXPERTS)
        backward = ", with backward" if result["backward"] else ""
        rows.append((f"{result['tokens']}, {result['routing']}{backward}", *cells))
    return documents.table(("tokens, routing", *EXPERTS.values()), rows, left=1)


def gpu_experts_table() -> str:
    """GPU time in microseconds, and the speed-up over the fastest other way; also for our kernels of other GPUs."""
    rows = []
    for result in run("h200-experts")["results"]:
        if result["routing"] != "balanced" or not result["providers"]:
            continue
        us = {way: figures["kernel_us"] for way, figures in result["providers"].items()}
        others = [way for way in ("grouped_mm", "batched_mm") if way in us]
        best = min(us[way] for way in others)
        theirs = (f"{us[way]:.0f}" if way in us else "" for way in ("grouped_mm", "batched_mm"))
        ours = (f"{us[way]:.0f} ({gain(best / us[way])})" if way in us else "" for way in ("ours", "ours-mma"))
        trained = ", with backward" if result["backward"] else ""
        rows.append((f"{result['name']}, {result['tokens']}{trained}", *theirs, *ours))
    heads = ("experts, tokens", "grouped_mm", "batched_mm", HEADS["ours"], "by mma.sync")
    return documents.table(heads, rows, left=1)


def gpu_experts_machine() -> str:
    found = run("h200-experts")
    shapes = {
        result["name"]: f"{result['name']} has {result['experts']} experts of {result['dim']} x {result['hidden']}, "
        f"{result['top_k']} per token"
        for result in found["results"]
    }
    spreads = [way["kernel_us_spread"] for result in found["results"] for way in result["providers"].values()]
    facts = found["machine"]
    return (
        f"{facts['gpu']}, PyTorch {facts['torch']}, transformers {facts['transformers']}, {facts['dtype']}: GPU "
        f"time in us, balanced routing; {spread_of([each / 2 for each in spreads])}. {'; '.join(shapes.values())}."
    )


def experts_machine() -> str:
    found = run("cpu-experts")
    facts, shape = found["machine"], found["results"][0]
    spreads = [way["wall_us_spread"] for result in found["results"] for way in result["providers"].values()]
    return (
        f"{facts['cpu']}, {facts['threads']} threads, {facts['instructions']}, PyTorch {facts['torch']}, transformers "
        f"{facts['transformers']}, {facts['dtype']}: {shape['experts']} experts of {shape['dim']} x {shape['hidden']}, "
        f"{shape['top_k']} per token. Wall-time speed-ups over the fastest implementation of transformers. The "
        f"machine was busy with other work: {spread_of([each / 2 for each in spreads])}."
    )


def mma_sync_table() -> str:
    """The GEMMs of sm_80 on a Hopper GPU, beside other implementations that use mma.sync there."""
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


# Lower bounds of the time of a gated MLP.

FLOPS_PER_US, BYTES_PER_US = 800e6, 3.0e6


def floors_table() -> str:
    rows = []
    for m, d, h in (result["shape"] for result in run("h100-mlp")["results"]):
        cells, least = [], 0.0
        # Input rows, output rows and weights of the two kernels, in elements of two bytes.
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
    """By dtype, way and machine: median speed-ups, per number of rows and overall; the number of losses."""
    rows = []
    for dtype, way in itertools.product(("float32", "bfloat16"), ("inference", "training")):
        for maker in MODULES:
            medians = [
                1 / statistics.median(module_ratios(maker, dtype, way, *bounds)) for bounds in (*ROWS, (1, 2048))
            ]
            of = [each for each in run(MODULES[maker])["results"] if (each["dtype"], each["way"]) == (dtype, way)]
            losses = sum(min(each["ratios"]) > 1.05 for each in of)
            rows.append((f"{dtype}, {way}", maker, *map(gain, medians), f"{losses} of {len(of)}"))
    heads = ("", "CPU", *(f"{low} to {high} rows" for low, high in ROWS), "all", "slower than 0.95x, twice")
    return documents.table(heads, rows, left=2)


def module_ratios(maker: str, dtype: str, way: str, low: int = 1, high: int = 2048) -> list[float]:
    return [
        each["ratios"][0]
        for each in run(MODULES[maker])["results"]
        if (each["dtype"], each["way"]) == (dtype, way) and low <= each["rows"] <= high
    ]


def modules_machines() -> str:
    facts = {maker: run(name)["machine"] for maker, name in MODULES.items()}
    words = [
        f"{maker}: {each['cpu']}, {each['threads']} threads, {each['instructions']}, a copy at "
        f"{each['copy_bandwidth_GBps']} GB/s, PyTorch {each['torch']}"
        for maker, each in facts.items()
    ]
    return f"{'; '.join(words)}. Medians of the speed-ups."


# Models that fuse_mlps fuses.


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
        f"Of the {total} MLPs in the {types} model types of transformers {version} that a configuration builds, "
        f"{fused / total:.1%} are fused, and {(fused + pointwise) / total:.1%} with those that have only "
        f"`act(gate) * up` fused. Groups of experts: of {experts}, {experts_fused / experts:.1%} are fused whole on a "
        f"CPU, and {experts_pointwise} in the product only."
    )


if __name__ == "__main__":
    main()
