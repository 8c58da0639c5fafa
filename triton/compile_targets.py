"""Compiles the Triton kernels for every GPU generation, without a GPU, and shows what each takes of the chip.

    python triton/compile_targets.py
    python triton/compile_targets.py --target 90 --activations all
    python triton/compile_targets.py --target gfx942

Every kernel is compiled as a call of the package would launch it, with the default launch parameters. The exit status
is 1 where a kernel does not compile, spills registers to memory or takes more shared memory than its GPU has.
Compiled kernels stay in Triton's cache. Triton's wheel compiles for NVIDIA and AMD; for Intel it has no compiler.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import kernels
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import project

KIB = 1024
N, K = 3072, 768


class Case(NamedTuple):
    """One kernel as one call launches it. Arguments without a type in ``types`` are compile-time constants."""

    name: str
    kernel: str  # module.function
    types: dict
    constants: dict
    options: dict
    aligned: bool = True


class Resources(NamedTuple):
    registers: int
    spills: int  # instructions that reload a spilled register; on AMD's GPUs the registers
    shared: int  # bytes a block


def backend(module: str):
    os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())
    variant = "cuda" if torch.cuda.is_available() else "cpu"  # both hold the same Triton kernels
    package = kernels.get_kernel(project.repo_id(), version=project.version(), backend=variant, check_arch=False)
    return importlib.import_module(f"{package.__name__}.backends.triton.{module}")


def gpus():
    """One GPU of each generation, by NVIDIA's capability or AMD's name: what the launch parameters depend on."""
    gpu = backend("configs").Gpu
    return {
        "80": gpu("A100", 80, 163 * KIB, 108),
        "86": gpu("A10", 86, 99 * KIB, 72),
        "89": gpu("L40S", 89, 99 * KIB, 142),
        "90": gpu("H100", 90, 227 * KIB, 132),
        "100": gpu("B200", 100, 227 * KIB, 148),
        "120": gpu("RTX 5090", 120, 99 * KIB, 170),
        "gfx90a": gpu("MI250", 0, 64 * KIB, 104),
        "gfx942": gpu("MI300X", 0, 64 * KIB, 304),
        "gfx950": gpu("MI355X", 0, 64 * KIB, 256),
        "gfx1201": gpu("RX 9070 XT", 0, 64 * KIB, 64),
    }


def activation_codes(which):
    table = importlib.import_module(backend("configs").__name__.replace(".backends.triton.configs", ".activations"))
    rows = table.ACTIVATIONS if which == "all" else [table.get_activation(name) for name in which.split(",")]
    return {row.name: row.code for row in rows}


def pointwise_cases(dtype, activation, rows=(8192, 1)):
    """Chunks of a packed projection (strided rows), and contiguous tensors (one long row)."""
    name, code = activation
    for kernel, inputs, outputs in (
        ("act_and_mul_kernel", ("gate", "up"), ("out",)),
        ("act_and_mul_backward_kernel", ("grad", "gate", "up"), ("dgate", "dup")),
    ):
        for count in rows:
            tile_rows, tile_cols = backend("glu").tile_shape(count, N, 4 if dtype == "fp32" else 2)
            types = {f"{tensor}_ptr": f"*{dtype}" for tensor in inputs + outputs}
            types.update(dict.fromkeys(("cols", *(f"{tensor}_stride" for tensor in inputs)), "i32"))
            constants = {"ACTIVATION": code, "TILE_ROWS": tile_rows, "TILE_COLS": tile_cols}
            if count == 1:  # Triton makes a constant of an argument that is 1
                constants["rows"] = 1
            else:
                types["rows"] = "i32"
            yield Case(f"{kernel} {dtype} {name} {tile_rows}x{tile_cols}", f"glu.{kernel}", types, constants, {})


def gemm_cases(dtype, activation, gpu, Ms, ops=("linear", "gated_linear"), precision="ieee", aligned=True):
    name, code = activation
    element_size, tensor_cores = (4, precision == "tf32") if dtype == "fp32" else (2, True)
    for op in ops:
        for M in Ms:
            config = backend("configs").default_config(op, M, N, element_size, tensor_cores and aligned, gpu)
            options = {key: config.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in config}
            for descriptors in {False, config["DESCRIPTORS"]}:
                types = gemm_types(op, dtype, config, descriptors)
                constants = {"ACTIVATION": code, "INPUT_PRECISION": precision, **config, "DESCRIPTORS": descriptors}
                constants.update(weight_col_stride=1, up_weight_col_stride=1)
                tile = f"{config['BLOCK_M']}x{config['BLOCK_N']}x{config['BLOCK_K']}"
                how = "descriptors" if descriptors else "pointers" if aligned else "unaligned"
                kind = f"{dtype} {precision}" if dtype == "fp32" else dtype
                label = f"{op} {kind} {name} M={M} {tile} {how}"
                yield Case(label, "gemm.matmul_kernel", types, constants, options, aligned)


def gemm_types(op, dtype, config, descriptors):
    def matrix(rows):
        return f"tensordesc<{dtype}[{rows}, {config['BLOCK_K']}]>" if descriptors else f"*{dtype}"

    types = {"x": matrix(config["BLOCK_M"]), "weight": matrix(config["BLOCK_N"])}
    types.update(dict.fromkeys(("bias_ptr", "out_ptr"), f"*{dtype}"))
    types.update(dict.fromkeys(("M", "N", "K", "x_stride", "weight_row_stride", "up_weight_row_stride"), "i32"))
    if op == "gated_linear":
        types.update(up_weight=matrix(config["BLOCK_N"]), up_bias_ptr=f"*{dtype}")
    return types


def experts_cases(dtype, activation, tokens, experts=128, top_k=8):
    """The four kernels of experts_mlp: gated, with biases and limits, then down."""
    name, code = activation
    experts_module, slots = backend("experts"), tokens * top_k
    integers = dict.fromkeys(("slots", "experts", "row_tiles", "N", "K", "x_stride", "features"), "i32")
    strides = dict.fromkeys(("expert_stride", "feature_stride", "up_weight_offset", "up_bias_offset"), "i32")
    strides["bias_expert_stride"] = "i32"
    lists = {"index_ptr": "*i64", "slots_ptr": "*i32", "ends_ptr": "*i32", "weights_ptr": "*fp32"}
    tensors = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr", "rows_ptr"), f"*{dtype}")
    types = {**integers, **strides, **lists, **tensors, "limit": "fp32", "up_offset": "fp32"}
    for kernel, constants in (
        ("route_kernel", {"BLOCK": experts_module.route_block(slots)}),
        ("add_up_kernel", {"TOP_K": top_k, "BLOCK": experts_module.add_up_block(N)}),
    ):
        yield Case(f"{kernel} {dtype} tokens={tokens}", f"experts.{kernel}", types, constants, {})
    for gated in (True, False):
        config = experts_module.tiles(slots, experts, gated, 4 if dtype == "fp32" else 2)
        options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
        way = {"TOP_K": top_k if gated else 0, "SCATTER": not gated, "GATED": gated, "LIMITED": gated}
        constants = {**way, "ACTIVATION": code, "INPUT_PRECISION": "ieee", "EXPERTS": experts, **config}
        constants.update(column_stride=1, bias_stride=1)
        tile = f"{config['BLOCK_M']}x{config['BLOCK_N']}x{config['BLOCK_K']}"
        label = f"experts {'gate and up' if gated else 'down'} {dtype} {name} tokens={tokens} {tile}"
        yield Case(label, "experts.grouped_kernel", types, constants, options)


def cases(gpu, dtypes, activations):
    """Each activation in each kernel, and the first of them in every form that the kernels take."""
    first, *others = activations.items()
    if "bf16" in dtypes:
        yield from pointwise_cases("bf16", first)
        yield from gemm_cases("bf16", first, gpu, (1, 64, 8192))
        yield from gemm_cases("bf16", first, gpu, (1, 8192), aligned=False)
        for tokens in (1, 4096):
            yield from experts_cases("bf16", first, tokens)
        for activation in others:
            yield from pointwise_cases("bf16", activation, rows=(8192,))
            yield from gemm_cases("bf16", activation, gpu, (8192,), ops=("gated_linear",))
    if "fp32" in dtypes:
        yield from pointwise_cases("fp32", first)
    if "fp32" in dtypes and gpu.capability:  # else PyTorch multiplies
        yield from gemm_cases("fp32", first, gpu, (64, 8192))
        yield from gemm_cases("fp32", first, gpu, (8192,), aligned=False)
        yield from gemm_cases("fp32", first, gpu, (8192,), precision="tf32")
        yield from experts_cases("fp32", first, 4096)


def compile_case(case, target):
    """Resources that the kernel takes, or the compiler's error."""
    module, function = case.kernel.split(".")
    kernel = getattr(backend(module), function)
    signature = {name: case.types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(i,): case.constants.get(name) for i, name in enumerate(kernel.arg_names) if name not in case.types}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in case.types}
    source = ASTSource(kernel, signature, constants, divisible if case.aligned else {})
    try:
        compiled = triton.compile(source, target=gpu_target(target), options=case.options)
    except Exception as error:  # whatever the compiler raises is this case's result
        return f"{type(error).__name__}: {error}"
    if "amdgcn" in compiled.asm:
        counted = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count): +(\d+)", compiled.asm["amdgcn"]))
        registers, *spills = (int(counted[name]) for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count"))
        return Resources(registers, sum(spills), compiled.metadata.shared)
    registers, stack = registers_and_stack(compiled.asm["cubin"])
    reloads = stack and compiled.asm["sass"].count("LDL")  # a stack that is never read holds no spilled registers
    return Resources(registers, reloads, compiled.metadata.shared)


def gpu_target(name):
    if name.startswith("gfx"):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(name), 32)


def registers_and_stack(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack)


def verdict(resources, gpu):
    if isinstance(resources, str):
        return resources
    if resources.spills:
        return f"spills registers to memory: {resources.spills}"
    if resources.shared > gpu.shared_memory:
        return f"takes {resources.shared} bytes of shared memory of {gpu.shared_memory}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=list(gpus()), help="default: every target")
    parser.add_argument("--activations", default="gelu_pytorch_tanh", help="names with commas between, or all")
    parser.add_argument("--dtype", action="append", choices=("bf16", "fp32"), help="default: both")
    arguments = parser.parse_args()
    dtypes = arguments.dtype or ("bf16", "fp32")
    activations = activation_codes(arguments.activations)
    targets = {target: gpus()[target] for target in arguments.target or gpus()}
    jobs = [(case, target) for target, gpu in targets.items() for case in cases(gpu, dtypes, activations)]
    failures = 0
    print(f"{'target':>7} {'registers':>9} {'spills':>6} {'shared KiB':>10}  kernel")
    with ProcessPoolExecutor() as pool:
        for (case, target), resources in zip(jobs, pool.map(compile_case, *zip(*jobs))):
            problem = verdict(resources, targets[target])
            failures += bool(problem)
            registers, spills, shared = ("-", "-", 0) if isinstance(resources, str) else resources
            row = f"{target:>7} {registers:>9} {spills:>6} {shared / KIB:>10.1f}  {case.name}"
            print(f"{row}  <-- {problem}" if problem else row, flush=True)
    print(f"{len(jobs)} kernels, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
