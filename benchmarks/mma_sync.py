"""The GEMMs of sm_80, forced on the GPU at hand, against what else multiplies by mma.sync there.

    python benchmarks/mma_sync.py                    every kernel, the best of each, and the ratios
    python benchmarks/mma_sync.py --build            compiles build/mma_sync.so alone (needs nvcc, no GPU)

The peers are cuBLASLt's kernels of Ampere's class, Triton's compiled for 8.0, and two limits: products from registers,
and reading memory. Only ratios inside of one run count, and only on the GPU they are measured on: times on a Hopper GPU
say nothing of other chips. Writes build/mma_sync.json.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import torch

import gemm_kernels
import machine  # noqa: F401  (names the local build)
import measure
import project
from builder import toolchain

LIBRARY = project.BUILD / "mma_sync.so"
LARGE = [(8192, 768, 3072), (8192, 4096, 14336)]
ACTIVATED = [(8192, 768, 3072), (16384, 1280, 5120)]
FEW_ROWS = [(m, 4096, 14336) for m in (1, 8, 16, 32, 64)]
ROUNDS = 5
Way = Callable[[], object]


def build() -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".cu")
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < source.stat().st_mtime:
        LIBRARY.parent.mkdir(exist_ok=True)
        flags = ["-std=c++20", "-O3", "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-shared", "-Xcompiler=-fPIC"]
        flags += ["-gencode=arch=compute_90,code=sm_90"]
        subprocess.run([toolchain.nvcc().path, *flags, "-o", LIBRARY, source], check=True)
    library = ctypes.CDLL(str(LIBRARY))
    library.start_products.restype = ctypes.c_double
    return library


def microseconds(ways: dict[str, Way], rounds: int = ROUNDS, budget: float = 4000.0) -> dict[str, float]:
    """Medians of one call of each, as graphs that take turns long enough for clocks to settle."""
    turns = {}
    for name, way in ways.items():
        once = measure.replay_microseconds(measure.captured(way, 3)) / 3
        calls = max(3, min(200, int(budget / once)))
        graph = measure.captured(way, calls)
        turns[name] = lambda graph=graph, calls=calls: {"us": measure.replay_microseconds(graph) / calls}
    measure.in_turns(turns, 2)
    return {name: found["us"] for name, found in measure.in_turns(turns, rounds).items()}


def best(ways: dict[str, Way]) -> tuple[str, float]:
    """The fastest, of a first look at all and a second at the first five."""
    first = microseconds(ways, rounds=2, budget=1000.0)
    few = sorted(first, key=first.get)[:5]
    second = microseconds({name: ways[name] for name in few})
    name = min(second, key=second.get)
    return name, second[name]


def ours(fused_mlp, product: str, call: Way) -> dict[str, Way]:
    """A call with each of our kernels."""

    def with_kernel(kernel: int) -> Way:
        def run():
            with gemm_kernels.forced(fused_mlp, "sm80", kernel):
                return call()

        return run

    few = call().shape[0] <= 64
    entries = enumerate(gemm_kernels.entries("sm80"))
    return {
        " ".join(entry): with_kernel(kernel)
        for kernel, entry in entries
        if entry[1] == product and (few or entry[0] == "tiled")
    }


def peers(x: torch.Tensor, weight: torch.Tensor) -> tuple[dict[str, Way], dict[str, Way]]:
    """cuBLASLt's and Triton's ways to x weight^T."""
    import cublaslt
    import triton_sm80

    product = cublaslt.Product(x, weight)
    lt = {}
    for name, algorithm in product.ampere():
        lt[f"{name} #{len(lt)}"] = lambda algorithm=algorithm: product.run(algorithm)
    triton = {} if len(x) % 16 else {str(tile): triton_sm80.Product(x, weight, tile).run for tile in triton_sm80.TILES}
    return lt, triton


def weights(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5


def measured(fused_mlp, library: ctypes.CDLL) -> list[dict]:
    """What was found, an entry each."""
    found = []
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    sink = torch.zeros(4, device="cuda")
    stream = lambda: ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)  # noqa: E731
    at = lambda tensor: ctypes.c_void_p(tensor.data_ptr())  # noqa: E731

    def products(rounds: int) -> float:
        return library.start_products(at(sink), multiprocessors, rounds, stream())

    took = microseconds({"": lambda: products(4000)})[""]
    peak = products(4000) / took
    found.append({"what": "mma.sync from registers", "TFLOPs": peak / 1e6})
    print(found[-1], flush=True)

    def compare(what: str, flops: float, own: dict[str, Way], others: dict[str, dict[str, Way]]) -> dict:
        fastest = {"ours": best(own)} | {name: best(ways) for name, ways in others.items() if ways}
        every = {way: run for ways in (own, *others.values()) for way, run in ways.items()}
        chosen = {name: every[way] for name, (way, _) in fastest.items()}
        together = microseconds(chosen)
        entry = {"what": what, "kernels": {name: way for name, (way, _) in fastest.items()}, "us": together}
        entry["share_of_peak"] = {name: flops / us / peak for name, us in together.items()}
        found.append(entry)
        print(json.dumps(entry), flush=True)
        return entry

    for m, dim, hidden in LARGE:
        x, gate, up, down = weights(m, dim), weights(hidden, dim), weights(hidden, dim), weights(dim, hidden)
        lt, triton = peers(x, torch.cat([gate, up]))
        entry = compare(
            f"gated {m} {dim} {hidden}",
            4.0 * m * dim * hidden,
            ours(fused_mlp, "Gated", lambda: fused_mlp.gated_linear(x, gate, up, activation="silu")),  # noqa: B023
            {"cublaslt": lt, "triton": triton},
        )
        hidden_rows, packed = weights(m, hidden), weights(m, 2 * hidden)
        lt_down, triton_down = peers(hidden_rows, down)
        own_down = ours(fused_mlp, "Plain", lambda: fused_mlp.linear(hidden_rows, down))  # noqa: B023
        second = compare(
            f"down {m} {hidden} {dim}", 2.0 * m * dim * hidden, own_down, {"cublaslt": lt_down, "triton": triton_down}
        )
        gate_rows, up_rows = packed.chunk(2, dim=-1)
        eager = microseconds({"": lambda: torch.nn.functional.silu(gate_rows) * up_rows})[""]  # noqa: B023
        theirs = entry["us"]["cublaslt"] + eager + second["us"]["cublaslt"]
        whole = entry["us"]["ours"] + min(second["us"][name] for name in ("ours", "cublaslt"))
        found.append({"what": f"MLP {m} {dim} {hidden}: ours to GEMMs and eager's pointwise", "ratio": whole / theirs})
        print(found[-1], flush=True)

    for m, dim, hidden in ACTIVATED:
        x, weight, bias = weights(m, dim), weights(hidden, dim), weights(1, hidden)[0]
        lt, triton = peers(x, weight)
        entry = compare(
            f"bias and GELU {m} {dim} {hidden}",
            2.0 * m * dim * hidden,
            ours(fused_mlp, "Plain", lambda: fused_mlp.linear(x, weight, bias, activation="gelu")),  # noqa: B023
            {"cublaslt": lt, "triton": triton},
        )
        made = weights(m, hidden)
        pointwise = microseconds({"": lambda: torch.nn.functional.gelu(made)})[""]  # noqa: B023
        ratio = entry["us"]["ours"] / (entry["us"]["cublaslt"] + pointwise)
        found.append({"what": f"bias and GELU {m} {dim} {hidden}: ours to GEMM and pointwise kernel", "ratio": ratio})
        print(found[-1], flush=True)

    for m, dim, hidden in FEW_ROWS:
        x, gate, up, down = weights(m, dim), weights(hidden, dim), weights(hidden, dim), weights(dim, hidden)
        rows = weights(m, hidden)
        for what, product, call, read in (
            ("gated", "Gated", lambda: fused_mlp.gated_linear(x, gate, up, activation="silu"), (gate, up)),  # noqa: B023
            ("down", "Plain", lambda: fused_mlp.linear(rows, down), (down,)),  # noqa: B023
        ):
            memory = torch.cat([tensor.flatten() for tensor in read])
            size = ctypes.c_int64(memory.numel() * 2)

            def reading(memory=memory, size=size):
                library.start_reading(at(memory), size, at(sink), multiprocessors, stream())

            # Weights of which a part stays in L2 from call to call: the reading kernel has the same advantage.
            name, _ = best(ours(fused_mlp, product, call))
            together = microseconds({"ours": ours(fused_mlp, product, call)[name], "reading": reading})
            share = together["reading"] / together["ours"]
            found.append({"what": f"{what} {m} rows", "kernel": name, "us": together, "share_of_bandwidth": share})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="compile, and measure nothing")
    if parser.parse_args().build:
        build()
        return
    if not torch.cuda.is_available():
        sys.exit("error: no GPU")
    from kernels import get_kernel

    library = build()
    fused_mlp = get_kernel(project.repo_id(), version=project.version(), backend="cuda")
    with torch.cuda.stream(torch.cuda.Stream()), fused_mlp.backend("cuda"), torch.no_grad():
        found = measured(fused_mlp, library)
    out = project.BUILD / "mma_sync.json"
    out.write_text(json.dumps({"machine": measure.machine(), "found": found}, indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
