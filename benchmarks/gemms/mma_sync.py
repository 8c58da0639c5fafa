"""The sm_80 GEMMs, forced on the present GPU, against other mma.sync GEMMs.

    python benchmarks/gemms/mma_sync.py                            every kernel, the best of each, and the ratios
    python benchmarks/gemms/mma_sync.py --build                    only compile build/mma_sync.so (needs nvcc, no GPU)
    python benchmarks/gemms/mma_sync.py --parts rows --shapes 64,4096,14336
    python benchmarks/gemms/mma_sync.py --from build/mma_sync.json  show the results of such a run; measure nothing

The peers are cuBLASLt's Ampere-class kernels, Triton kernels compiled for 8.0, and two limits: products from registers,
and reading memory. Only ratios within one run are meaningful, and only for the GPU they were measured on: times on a
Hopper GPU say nothing about other chips. Writes <out>.json after every product, and prints a table.
"""

import argparse
import ctypes
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import gemm_kernels
import machine  # noqa: F401  (names the local build)
import measure
import project
from builder import toolchain

LIBRARY = project.BUILD / "mma_sync.so"
SHAPES = {  # M, D, H of each part
    "mlp": [(8192, 768, 3072), (8192, 4096, 14336)],
    "activated": [(8192, 768, 3072), (16384, 1280, 5120)],
    "rows": [(m, 4096, 14336) for m in (1, 8, 16, 32, 64)],
}
COMPARED = 24  # ways at a time
SLOW = 1.5  # times the least: one call of such a way is enough
SETTLED = 40_000.0  # microseconds of a turn that is long enough for the clock, which large products lower, to settle
LOOKS, TURNS = 7, 27  # for each way in a search, and for the best ones: large products differ by 5% between turns
FINALISTS = 2  # from each search; the turns decide among them
FEW = 64  # streamed kernels are tried up to this many rows
COPIES = 8  # copies of weights take this many times the bytes of L2
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


def microseconds(ways: dict[Hashable, Way], rounds: int = 5, budget: float = 4000.0) -> dict[Hashable, float]:
    """Medians of one call of each, as interleaved graphs whose turns are long enough for clocks to settle.

    The order changes each round, because the clock may still be that of the previous way.
    """
    turns = {}
    for name, way in ways.items():
        way()
        calls = max(3, min(200, int(budget / at_first_sight(way))))
        graph = measure.captured(way, calls)
        turns[name] = lambda graph=graph, calls=calls: measure.replay_microseconds(graph) / calls
    samples = {name: [] for name in ways}
    for _ in range(2 + rounds):
        for name in random.sample(list(ways), len(ways)):
            samples[name].append(turns[name]())
    return {name: statistics.median(found[2:]) for name, found in samples.items()}


def at_first_sight(way: Way, calls: int = 2) -> float:
    """Microseconds of one call, or of its launch on the CPU if that takes longer."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        way()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


class Search(NamedTuple):
    """Among some ways, the fastest ones that remain to be compared. A search that ran out of time has none."""

    names: list[str]
    tried: int
    of: int


def search(ways: dict[str, Way], seconds: float) -> Search:
    """Compares the ways; if there are many, only the best of a first look, which may take these seconds."""
    candidates = list(ways)
    if len(ways) > COMPARED:
        looked = first_look(ways, seconds)
        if len(looked) < len(ways):
            return Search([], len(looked), len(ways))
        candidates = sorted(looked, key=looked.get)[: COMPARED // 2]
    found = microseconds({name: ways[name] for name in candidates}, rounds=LOOKS, budget=SETTLED / 2)
    return Search(sorted(found, key=found.get)[:FINALISTS], len(ways), len(ways))


def first_look(ways: dict[str, Way], seconds: float) -> dict[str, float]:
    """Microseconds of a call of each way that there was time for; slow ways are called once."""
    until, looked = time.monotonic() + seconds, {}
    for name, way in ways.items():
        if time.monotonic() > until:
            break
        looked[name] = at_first_sight(way, 1)
    least = min(looked.values(), default=0.0)
    return {name: at_first_sight(ways[name]) if us <= SLOW * least else us for name, us in looked.items()}


def ours(fused_mlp, product: str, call: Way) -> dict[str, Way]:
    """A call with each of our kernels."""

    def with_kernel(kernel: int) -> Way:
        def run():
            with gemm_kernels.forced(fused_mlp, "sm80", kernel):
                return call()

        return run

    few = call().shape[0] <= FEW
    entries = enumerate(gemm_kernels.entries("sm80"))
    return {
        " ".join(entry): with_kernel(kernel)
        for kernel, entry in entries
        if entry[1] == product and (few or entry[0] == "tiled")
    }


def cublaslt_ways(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Way]:
    import cublaslt

    product = cublaslt.Product(x, weight)
    found = enumerate(product.ampere())
    return {f"{name} #{i}": lambda algorithm=algorithm: product.run(algorithm) for i, (name, algorithm) in found}


def triton_ways(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Way]:
    import triton_sm80

    if len(x) % 16:
        return {}
    return {str(tile): triton_sm80.Product(x, weight, tile).run for tile in triton_sm80.TILES}


def matrix(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5


class Bench:
    """Collects results, and measures more."""

    def __init__(self, fused_mlp, library: ctypes.CDLL, seconds: float, out: Path):
        self.fused_mlp, self.library, self.seconds, self.out = fused_mlp, library, seconds, out
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.sink = torch.zeros(4, device="cuda")
        self.found = {"machine": measure.machine(), "found": []}
        took = microseconds({"": lambda: self._products(4000)})[""]
        self.peak = self._products(4000) / took  # operations per microsecond
        self.add({"what": "mma.sync from registers", "TFLOPs": self.peak / 1e6})

    def _products(self, rounds: int) -> float:
        return self.library.start_products(_at(self.sink), self.multiprocessors, rounds, _stream())

    def add(self, entry: dict) -> None:
        self.found["found"].append(entry)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.with_suffix(".json").write_text(json.dumps(self.found, indent=1) + "\n")

    def compare(self, what: str, flops: float, product: str, call: Way, x: torch.Tensor, weight: torch.Tensor) -> dict:
        """Compares the best of our kernels, for the whole call, with the best of those that only multiply, if found."""
        every = {
            "ours": ours(self.fused_mlp, product, call),
            "cublaslt": cublaslt_ways(x, weight),
            "triton": triton_ways(x, weight),
        }
        searches = {name: search(ways, self.seconds) for name, ways in every.items() if ways}
        finalists = {(name, way): every[name][way] for name, found in searches.items() for way in found.names}
        us = microseconds(finalists, TURNS, SETTLED)
        chosen = {name: way for name, way in sorted(us, key=us.get, reverse=True)}  # the fastest comes last
        chosen = {name: chosen[name] for name in searches if name in chosen}
        tried = {name: f"{found.tried} of {found.of}" for name, found in searches.items()}
        entry = {"what": what, "kernels": chosen, "tried": tried}
        entry["us"] = {name: us[name, way] for name, way in chosen.items()}
        entry["share_of_peak"] = {name: flops / us / self.peak for name, us in entry["us"].items()}
        self.add(entry)
        return entry["us"]

    def mlp(self, m: int, dim: int, hidden: int) -> None:
        x, gate, up, down = matrix(m, dim), matrix(hidden, dim), matrix(hidden, dim), matrix(dim, hidden)
        gated = self.compare(
            f"gated {m} {dim} {hidden}",
            4.0 * m * dim * hidden,
            "Gated",
            lambda: self.fused_mlp.gated_linear(x, gate, up, activation="silu"),
            x,
            torch.cat([gate, up]),
        )
        rows, flops = matrix(m, hidden), 2.0 * m * dim * hidden
        second = self.compare(
            f"down {m} {hidden} {dim}", flops, "Plain", lambda: self.fused_mlp.linear(rows, down), rows, down
        )
        if not ("cublaslt" in gated and "cublaslt" in second):
            return
        halves = matrix(m, 2 * hidden).chunk(2, dim=-1)
        eager = microseconds({"": lambda: torch.nn.functional.silu(halves[0]) * halves[1]})[""]
        whole = gated["ours"] + min(second["ours"], second["cublaslt"])
        theirs = gated["cublaslt"] + eager + second["cublaslt"]
        self.add({"what": f"MLP {m} {dim} {hidden}: ours to GEMMs and eager's pointwise", "ratio": whole / theirs})

    def activated(self, m: int, dim: int, hidden: int) -> None:
        x, weight, bias = matrix(m, dim), matrix(hidden, dim), matrix(1, hidden)[0]
        call = lambda: self.fused_mlp.linear(x, weight, bias, activation="gelu")  # noqa: E731
        what = f"bias and GELU {m} {dim} {hidden}"
        us = self.compare(what, 2.0 * m * dim * hidden, "Plain", call, x, weight)
        if "cublaslt" not in us:
            return
        made = matrix(m, hidden)
        pointwise = microseconds({"": lambda: torch.nn.functional.gelu(made)})[""]
        ratio = us["ours"] / (us["cublaslt"] + pointwise)
        self.add({"what": f"{what}: ours to GEMM and pointwise kernel", "ratio": ratio})

    def rows(self, m: int, dim: int, hidden: int) -> None:
        x, rows = matrix(m, dim), matrix(m, hidden)
        self._stream_weights(
            f"gated {m} rows",
            "Gated",
            (2 * hidden, dim),
            lambda both: self.fused_mlp.gated_linear(x, *both.chunk(2), activation="silu"),
        )
        self._stream_weights(f"down {m} rows", "Plain", (dim, hidden), lambda down: self.fused_mlp.linear(rows, down))

    def _stream_weights(self, what: str, product: str, size: tuple[int, int], call: Callable[[torch.Tensor], object]):
        """Compares with reading the weights. Calls alternate over copies, so that neither finds weights in L2."""
        count, l2 = 2 * size[0] * size[1], torch.cuda.get_device_properties(0).L2_cache_size
        copies = itertools.cycle([matrix(*size) for _ in range(-(-COPIES * l2 // count))])

        def reading():
            memory, multiprocessors = _at(next(copies)), self.multiprocessors
            self.library.start_reading(memory, ctypes.c_int64(count), _at(self.sink), multiprocessors, _stream())

        ways = ours(self.fused_mlp, product, lambda: call(next(copies)))
        names = search(ways, self.seconds).names
        us = microseconds({name: ways[name] for name in names} | {"reading": reading}, 9)
        name = min(names, key=us.get)
        us = {"ours": us[name], "reading": us["reading"]}
        share = us["reading"] / us["ours"]
        self.add({"what": what, "kernels": {"ours": name}, "us": us, "share_of_bandwidth": share})


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def run(given: argparse.Namespace) -> dict:
    if not torch.cuda.is_available():
        sys.exit("error: no GPU")
    from kernels import get_kernel

    library = build()
    fused_mlp = get_kernel(project.repo_id(), version=project.version(), backend="cuda")
    cases = [(part, shape) for part in given.parts for shape in given.shapes or SHAPES[part]]
    with torch.cuda.stream(torch.cuda.Stream()), fused_mlp.backend("cuda"), torch.no_grad():
        bench = Bench(fused_mlp, library, given.seconds, given.out)
        for part, shape in tqdm(cases, disable=None):
            getattr(bench, part)(*shape)
    return bench.found


def print_table(found: dict) -> None:
    """Prints microseconds of each way, and the entry's measure: share of the peak or of the bandwidth, or a ratio."""
    table = Table(title=found["machine"]["gpu"])
    for column, justify in (("", "left"), ("us", "left"), ("share or ratio", "left"), ("our kernel", "left")):
        table.add_column(column, justify=justify)
    for entry in found["found"]:
        us = ", ".join(f"{name} {figure:.1f}" for name, figure in entry.get("us", {}).items())
        shares = ", ".join(f"{share:.3f}" for share in entry.get("share_of_peak", {}).values())
        one = [f"{entry[key]:.3f}" for key in ("share_of_bandwidth", "ratio", "TFLOPs") if key in entry]
        table.add_row(entry["what"], us, shares or one[0], entry.get("kernels", {}).get("ours", ""))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def shape(text: str) -> tuple[int, ...]:
    m, dim, hidden = (int(number) for number in text.split(","))
    return m, dim, hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--parts", nargs="+", choices=SHAPES, default=list(SHAPES), help="what is measured (all)")
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="M,D,H", help="in the place of each part's own")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the first look at a library's ways")
    parser.add_argument("--from", dest="source", type=Path, help="show what such a run has written; measure nothing")
    parser.add_argument("--out", type=Path, default=project.BUILD / "mma_sync")
    given = parser.parse_args()
    if given.build:
        build()
        return
    print_table(json.loads(given.source.read_text()) if given.source else run(given))


if __name__ == "__main__":
    main()
