"""Small calls that reach every kernel. As a script (`make sanitize`), puts them under NVIDIA's compute-sanitizer.

Memcheck finds accesses outside of allocations, racecheck hazards in shared memory, synccheck misuse of barriers.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import machine
import project
from builder import toolchain
from reference import ACTIVATIONS, DTYPES, operands

TOOLS = ("memcheck", "racecheck", "synccheck")

# Rows, in, out. All dimensions have tails, and together they reach every kernel: test_gemm.py checks it.
GATED = [
    # streamed, by rows of a tile; k in one to eight parts
    *((5, k, n) for k, n in ((40, 40), (1544, 3080), (1032, 40), (1544, 40))),
    *((40, k, n) for k, n in ((392, 40), (1544, 264), (1032, 40))),
    *((65, k, n) for k, n in ((1032, 1032), (776, 40))),
    *((129, k, n) for k, n in ((776, 392), (776, 40))),
    *((197, k, n) for k, n in ((1544, 776), (776, 264), (776, 40))),
    # tiled, in the order of launch.cuh: several tiles of rows, and part of one
    (390, 328, 3080),
    (190, 328, 5128),
    (270, 4104, 40),
    *((m, 328, n) for m, n in ((257, 6152), (77, 10248))),
    *((m, 328, n) for m, n in ((257, 3080), (129, 5128))),
    *((m, 328, 40) for m in (177, 77)),
    *((m, 328, n) for m, n in ((300, 14344), (150, 10248))),
    *((m, 328, n) for m, n in ((900, 1544), (190, 6152))),
]
PLAIN = [
    # streamed
    *((5, k, n) for k, n in ((40, 40), (3080, 2056), (1544, 40))),
    *((40, k, n) for k, n in ((40, 40), (1544, 520), (1544, 40))),
    *((65, k, n) for k, n in ((40, 40), (1032, 40), (40, 5128))),
    *((129, k, n) for k, n in ((40, 40), (776, 520), (776, 40))),
    *((197, k, n) for k, n in ((40, 40), (776, 40), (776, 520), (776, 264))),
    *((250, k, n) for k, n in ((776, 264), (1544, 520), (4104, 264))),
    # tiled
    (1500, 328, 2056),
    (222, 328, 10248),
    (200, 328, 6152),
    *((m, 328, n) for m, n in ((257, 12296), (40, 20488))),
    *((m, 328, n) for m, n in ((257, 6152), (40, 8200))),
    (2000, 8200, 136),
    (257, 1544, 40),
    *((m, 328, 40) for m in (257, 40)),
    *((m, 328, n) for m, n in ((350, 6152), (40, 12296))),
]
WHOLE = [(5, (264, 520, 136)), (65, (264, 520, 136)), (600, (264, 520, 136))]


def gemms() -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    """Function, operands and activation of each call of a fused layer."""
    count = 0
    for dtype in (torch.bfloat16, torch.float16):
        for function, shapes in (("gated_linear", GATED), ("linear", PLAIN)):
            for rows, n_in, n_out in shapes:
                for activation in ("linear", ACTIVATIONS[1 + count % (len(ACTIVATIONS) - 1)]):
                    yield (
                        function,
                        operands(function, (rows,), (n_in, n_out, 0), dtype=dtype, device="cuda"),
                        activation,
                    )
                    count += 1
        for function in ("gated_mlp", "mlp"):
            for rows, sizes in WHOLE:
                yield function, operands(function, (rows,), sizes, dtype=dtype, device="cuda"), "silu"


def pointwise() -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    """Gate, up and activation: dense and packed, with and without a tail."""
    for dtype in DTYPES:
        for activation in ACTIVATIONS:
            for rows, cols in ((3, 328), (5, 77)):
                packed = torch.randn(rows, 2 * cols, device="cuda").to(dtype)
                yield *packed.chunk(2, dim=-1), activation
            yield *(torch.randn(rows, cols, device="cuda").to(dtype) for _ in range(2)), activation


def run(tool: str) -> None:
    """All calls, one at a time and announced, so that what the sanitizer reports stands below its call."""
    from kernels import get_kernel

    fused_mlp = get_kernel(project.repo_id(), version=project.version(), backend="cuda")
    calls = 0
    with fused_mlp.backend("cuda"):
        for function, made, activation in gemms():
            explanation = fused_mlp.explain(getattr(fused_mlp, function), **made, activation=activation)
            if tool == "racecheck" and "torch's GEMM" in explanation.reason:
                continue  # cuBLAS's kernels fault beside those that racecheck has instrumented
            shapes = ", ".join(f"{name} {list(operand.shape)}" for name, operand in made.items())
            print(f"{function}: {shapes}, {made['x'].dtype}, {activation}", flush=True)
            getattr(fused_mlp, function)(**made, activation=activation)
            torch.cuda.synchronize()
            calls += 1
        for gate, up, activation in pointwise():
            print(f"act_and_mul: {list(gate.shape)} by {gate.stride()}, {gate.dtype}, {activation}", flush=True)
            leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
            result = fused_mlp.act_and_mul(*leaves, activation)
            torch.autograd.grad(result, leaves, torch.ones_like(result))
            torch.cuda.synchronize()
            calls += 1
    print(f"{calls} calls")


def start(sanitizer: str, tool: str) -> subprocess.Popen:
    command = [sanitizer, f"--tool={tool}", "--error-exitcode=1"]
    command += ["--kernel-name=kns=fused_mlp", "--report-api-errors=no"]  # what torch does besides is not checked
    command += [sys.executable, __file__, tool]
    # An allocation of its own for every tensor: what lies outside of one is then outside of allocated memory.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    if machine.device_type() != "cuda":
        sys.exit("sanitize needs a GPU and a torch with CUDA")
    nvcc = toolchain.nvcc()
    folders = [os.environ.get("PATH", ""), *([str(Path(nvcc.path).parent)] if nvcc else [])]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if sanitizer is None:
        sys.exit("sanitize needs compute-sanitizer (of the CUDA toolkit) on the PATH")
    begin = time.monotonic()
    failed = []
    for tool, process in {tool: start(sanitizer, tool) for tool in TOOLS}.items():
        output, _ = process.communicate()
        seconds = time.monotonic() - begin
        if process.returncode == 0:
            print(f"{tool}: clean, {seconds:.0f} s, {' '.join(output.splitlines()[-2:])}")
        else:
            print(f"{output}{tool}: FAILED, {seconds:.0f} s")
            failed.append(tool)
    if failed:
        sys.exit(f"{', '.join(failed)} found errors")


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
