"""The compiled CUDA extension in build/; inspecting its machine code needs no GPU."""

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import checkout
import gemm_kernels
import project
from builder import abi, toolchain
from tuning.sm80.prediction import Predictor

MIB = 2**20
DTYPE = b"bfloat16"  # the dtype whose kernels are disassembled
# Libraries that every machine with this torch has. torch brings the CUDA libraries; the extension needs none itself.
LIBRARIES = r"lib(torch_cuda|torch_cpu|torch|c10|stdc\+\+|gcc_s|m|c|dl|pthread|rt)\.so(\.\d+)?|ld-linux-.*\.so\.\d+"


@pytest.fixture(scope="module")
def extension(cuda_variant) -> Path:
    (found,) = (project.BUILD / cuda_variant.label).glob("*.abi3.so")
    return found


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    """The path of cuobjdump: the CUDA toolkit's if it is complete, else Triton's."""
    folders = [Path(toolchain.nvcc().path).parent]
    if (triton := find_spec("triton")) is not None:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    for folder in folders:
        if (path := shutil.which("cuobjdump", path=str(folder))) is not None:
            return path
    pytest.skip(f"no cuobjdump in {' or '.join(map(str, folders))}")


@pytest.fixture(scope="module")
def hopper_cubins(extension, cuobjdump, tmp_path_factory) -> list[Path]:
    return cubins(extension, cuobjdump, "sm_90a", tmp_path_factory.mktemp("cubins"))


def cubins(extension: Path, cuobjdump: str, arch: str, folder: Path) -> list[Path]:
    subprocess.run([cuobjdump, "-xelf", arch, str(extension)], cwd=folder, capture_output=True, check=True)
    found = sorted(folder.glob("*.cubin"))
    assert found
    return found


def cubins_of_sm80(extension: Path, cuobjdump: str, arch: str, folder: Path) -> list[Path]:
    """The cubins with the GEMMs of cuda/sm80, by the namespace in their mangled names."""
    return [path for path in cubins(extension, cuobjdump, arch, folder) if b"4sm80" in path.read_bytes()]


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> dict[str, set[str]]:
    """The opcodes of every function, without their modifiers."""
    found = {}
    for function in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        name, code = function.split(maxsplit=1)
        found[name] = set(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)", code, re.MULTILINE))
    return found


def resources(usage: str, keys: str = "STACK|LOCAL") -> Iterator[tuple[str, dict[str, int]]]:
    for name, figures in re.findall(r"^ Function (\S+):\n\s+(.*)$", usage, re.MULTILINE):
        yield name, {key: int(value) for key, value in re.findall(rf"({keys}):(\d+)", figures)}


@pytest.fixture(scope="module")
def hopper_usage(cuobjdump, hopper_cubins) -> dict[str, dict[str, int]]:
    """The stack and local memory of every kernel."""
    return {name: used for cubin in hopper_cubins for name, used in resources(output(cuobjdump, "-res-usage", cubin))}


def test_hopper_gemms_use_tensor_cores_and_tma(cuobjdump, hopper_cubins):
    """Hopper GEMMs of one dtype use HGMMA and TMA; the other dtype has the same opcodes, and disassembly is slow."""
    chosen = [cubin for cubin in hopper_cubins if b"gemm_kernelI" in cubin.read_bytes() and DTYPE in cubin.read_bytes()]
    code_of = {}
    for cubin in chosen:
        found = instructions(output(cuobjdump, "-sass", cubin))
        code_of |= {name: code for name, code in found.items() if "gemm_kernel" in name}
    loops = {re.search(r"(tiled|streamed|grouped|fitted)_gemm_kernel", name)[1] for name in code_of}
    assert loops == {"tiled", "streamed", "grouped", "fitted"}
    for name, code in code_of.items():
        assert {"HGMMA", "UTMALDG"} <= code, f"{name} lacks { ({'HGMMA', 'UTMALDG'} - code) }"


def test_products_of_fp8_use_tensor_cores_of_fp8_and_tma(cuobjdump, hopper_cubins):
    (cubin,) = (path for path in hopper_cubins if b"scaled_kernelI" in path.read_bytes())
    found = instructions(output(cuobjdump, "-sass", cubin))
    code_of = {name: code for name, code in found.items() if "scaled_kernel" in name}
    assert len(code_of) == 2 * len(gemm_kernels.DTYPES) + 2  # those of experts exist in one dtype
    for name, code in code_of.items():
        assert {"QGMMA", "UTMALDG"} <= code, name


# Bytes that kernels may spill, as measured; no other kernel may spill, and these no more. The gradient of trained
# experts holds the sums of its rows beside those of the tile; the gradient of a factor behind dropout has two tiles of
# ranks.
SPILLED = {"GroupedTilesI.*ProductE5": 16, "masked_outer_kernelI.*Li2E": 16}


def spilled(name: str) -> int:
    return next((most for kernel, most in SPILLED.items() if re.search(kernel, name)), 0)


def test_hopper_gemms_do_not_spill(hopper_usage):
    assert any("gemm_kernel" in name for name in hopper_usage)
    for name, figures in hopper_usage.items():
        assert figures["STACK"] <= spilled(name) and figures["LOCAL"] == 0, f"{name}: {figures}"


def test_code_for_every_arch_is_there(cuda_variant, extension, cuobjdump):
    cubins = re.findall(r"sm_(\d+[af]?)\.cubin", output(cuobjdump, "-lelf", extension))
    ptx = re.findall(r"sm_(\d+[af]?)\.ptx", output(cuobjdump, "-lptx", extension))
    archs = cuda_variant.archs
    wanted = [arch.replace(".", "").removesuffix("+PTX") for arch in archs]
    assert set(wanted) <= set(cubins)
    assert {arch.replace(".", "").removesuffix("+PTX") for arch in archs if arch.endswith("+PTX")} == set(ptx)
    # A cubin may exist and be empty, like the linker's.
    for arch in wanted:
        usage = output(cuobjdump, "-arch", f"sm_{arch}", "-res-usage", extension)
        assert any("pointwise_kernel" in name or "gemm_kernel" in name for name, _ in resources(usage)), arch


def test_extension_is_small(extension):
    """The extension stays below its size limit. Grouped products for five architectures take 1.2 MiB of it, kernels
    that read FP8 weights 0.75, int4 in tiles and those of adapters 0.1 each.
    """
    assert extension.stat().st_size <= 16.8 * MIB


def test_extension_keeps_its_statics_to_itself(cuda_variant, extension):
    assert abi.unique_symbols(extension) == []
    objects = (project.BUILD / ".cache" / cuda_variant.label).rglob("*.cu.o")
    symbols = "".join(output("nm", "--demangle", path) for path in objects)
    assert {*re.findall(r" (\w) .*devices_done$", symbols, re.MULTILINE)} == {
        "b"
    }  # whatever flags they were compiled with


TWO_BUILDS = """
import torch
from kernels import get_kernel

x, gate, up, down = (torch.randn(shape, device="cuda") for shape in ((512, 768), (3072, 768), (3072, 768), (768, 3072)))
given = [x.bfloat16(), *(weight.mul(0.03).bfloat16() for weight in (gate, up, down))]
wide = [tensor.double() for tensor in given]
expected = (torch.nn.functional.silu(wide[0] @ wide[1].T) * (wide[0] @ wide[2].T)) @ wide[3].T
for name in ("first", "second"):
    kernel = get_kernel(f"someone/{name}", version=VERSION)
    parts = kernel.explain(kernel.gated_mlp, *given, activation="silu").parts
    error = (kernel.gated_mlp(*given, activation="silu") - expected).norm() / expected.norm()
    print(kernel.__name__, parts[0].implementation, error.item() < 0.01)
"""


def test_two_builds_launch_in_one_process(extension, tmp_path):
    """Two builds in one process launch kernels with over 48 KiB of shared memory, which each build must request."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU to launch a kernel on")
    second = checkout.make(tmp_path / "second")
    (second / "torch-ext" / project.python_name() / "another.py").touch()
    checkout.commit(second)
    folders = {"first": project.BUILD, "second": checkout.build(second, "cuda")}
    local = ":".join(f"someone/{name}={folder}" for name, folder in folders.items())
    environment = {**os.environ, "LOCAL_KERNELS": local, "HF_HUB_OFFLINE": "1"}
    program = TWO_BUILDS.replace("VERSION", str(project.version()))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (one, *found), (other, *same) = (line.split() for line in done.stdout.splitlines())
    assert one != other and found == same and found[0] in gemm_kernels.ARCHITECTURES and found[1] == "True"


def test_extension_needs_torch_and_the_system_alone(extension):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "--dynamic", "--wide", extension))
    assert "libtorch_cpu.so" in needed
    assert [library for library in needed if not re.fullmatch(LIBRARIES, library)] == []


@pytest.mark.parametrize("architecture", gemm_kernels.ARCHITECTURES)
def test_the_kernels_are_those_of_the_list(extension, architecture):
    assert gemm_kernels.built(extension, architecture) == gemm_kernels.listed(architecture)


def test_every_grouped_kernel_is_there(hopper_usage):
    text = (project.ROOT / "cuda/sm90/grouped/grouped_rows.h").read_text()
    rows, more = (re.findall(r"VISIT\((\d+)\)", line) for line in re.findall(r"^#define .*", text, re.MULTILINE))
    names = output("c++filt", *(name for name in hopper_usage if "gemm_kernel" in name)).splitlines()
    for kernel, count in {"FittedGemm<": 4, "GroupedTiles<": 2, "OuterTiles<": 1}.items():
        assert sum(kernel in name for name in names) == count * len(gemm_kernels.DTYPES)
    names = [name for name in names if "grouped_gemm_kernel" in name]
    kernel = r"(GroupedGemm|GroupedTransposed)<(\w+), \(fused_mlp::Product\)(\d), (\d+)>"
    found = [re.search(kernel, name).groups() for name in names]
    wanted = [*itertools.product(["GroupedGemm"], gemm_kernels.DTYPES, "01", rows)]
    wanted += itertools.product(["GroupedTransposed"], gemm_kernels.DTYPES, "01", rows + more)
    assert rows and more and sorted(found) == sorted(wanted)


# The GEMMs of sm_80, by the target architecture: the capabilities that run its code, with the KiB of shared memory and
# the warps of a multiprocessor.
MULTIPROCESSORS = {
    "sm_80": {"8.0": (164, 64)},
    "sm_86": {"8.6": (100, 48), "8.7": (164, 48), "8.9": (100, 48)},
    "sm_90": {"9.0": (228, 64)},
    "sm_120": {"12.0": (100, 48), "12.1": (100, 48)},
}
KIB = 2**10


def ctas(registers: int, threads: int, shared: int, shared_kib: int, warps: int) -> int:
    """The number of CTAs that a multiprocessor holds. Registers are allocated to warps in units of 256; each CTA costs
    another 1 KiB of shared memory.
    """
    registers_of_warp = -(-registers * 32 // 256) * 256
    of_registers = 65536 // registers_of_warp // (threads // 32)
    return min(of_registers, shared_kib * KIB // (shared + KIB), warps // (threads // 32))


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[tuple[str, ...], tuple[int, int]]:
    """The threads and bytes of shared memory of sm80's kernels."""
    kernels = Predictor(tmp_path_factory.mktemp("sizes")).kernels()
    sizes = [(kernel.threads, kernel.shared) for kernel in kernels]
    return dict(zip(gemm_kernels.entries("sm80"), sizes, strict=True))


GROUPED = (
    r"grouped_(streamed|tiled)_kernel<\S*::Grouped(?:Streamed|Tiled)<(\w+), \(fused_mlp::Product\)([01]), ([^>]*)>"
)


def grouped_entries() -> list[tuple[str, ...]]:
    """Main loop, product number and arguments of each line of the list of grouped kernels."""
    text = (project.ROOT / "cuda/sm80/grouped/grouped.def").read_text()
    found = re.findall(r"^FUSED_MLP_GROUPED_(STREAMED|TILED)\((\w+), (.*)\)$", text, re.MULTILINE)
    numbers = {"Plain": "0", "Gated": "1"}
    return [(loop.lower(), numbers[product], arguments) for loop, product, arguments in found]


def resources_of_sm80(extension, cuobjdump, arch, folder) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields the demangled name and resources of each GEMM kernel of sm80, and checks that nothing is spilled."""
    for cubin in cubins_of_sm80(extension, cuobjdump, arch, folder):
        used = dict(resources(output(cuobjdump, "-res-usage", cubin), "REG|STACK|LOCAL"))
        for symbol, demangled in zip(used, output("c++filt", *used).splitlines(), strict=True):
            assert (used[symbol]["STACK"], used[symbol]["LOCAL"]) == (0, 0), demangled
            yield demangled, used[symbol]


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_grouped_kernels_of_sm80_fit_their_gpus(extension, cuobjdump, tmp_path, arch):
    """The listed kernels exist in both dtypes, spill nothing, and leave registers for two CTAs."""
    found = []
    for demangled, figures in resources_of_sm80(extension, cuobjdump, arch, tmp_path):
        if (kernel := re.search(GROUPED, demangled)) is None:
            continue
        loop, dtype, product, arguments = kernel.groups()
        found.append((dtype, loop, product, arguments.replace("(bool)1", "true").replace("(bool)0", "false")))
        first = 4 if loop == "tiled" else 3  # index of the first number of warps
        warps = math.prod(int(number) for number in arguments.split(", ")[first : first + 2])
        assert 2 * warps * -(-figures["REG"] * 32 // 256) * 256 <= 65536, demangled
    assert sorted(found) == sorted((dtype, *entry) for dtype in gemm_kernels.DTYPES for entry in grouped_entries())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])  # all of 8.x run the code of 8.0
def test_outer_products_of_sm80_fit_their_gpus(extension, cuobjdump, tmp_path, arch):
    """Both dtypes exist, spill nothing, and leave registers for two CTAs of four warps."""
    found = []
    for demangled, figures in resources_of_sm80(extension, cuobjdump, arch, tmp_path):
        if (kernel := re.search(r"outer_kernel<\S*::OuterGemm<(\w+)>", demangled)) is None:
            continue
        found.append(kernel[1])
        assert 2 * 4 * -(-figures["REG"] * 32 // 256) * 256 <= 65536, demangled
    assert sorted(found) == sorted(gemm_kernels.DTYPES)


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_gemms_of_sm80_fit_their_gpus(extension, cuobjdump, tmp_path, sizes, arch):
    """The kernels spill nothing, and a multiprocessor holds as many CTAs as the tiles were cut for."""
    limit = min(kib for kib, _ in MULTIPROCESSORS[arch].values())
    seen = set()
    for demangled, figures in resources_of_sm80(extension, cuobjdump, arch, tmp_path):
        if "::grouped_" in demangled or "::outer_" in demangled:
            continue
        ((loop, _, *arguments),) = gemm_kernels.named([demangled], "sm80")
        threads, shared = sizes[(loop, *arguments)]
        if shared > (limit - 1) * KIB:
            continue  # left out
        seen.add((loop, *arguments))
        for capability, (kib, warps) in MULTIPROCESSORS[arch].items():
            held = ctas(figures["REG"], threads, shared, kib, warps)
            wanted = 1 if threads > 128 else min(2, kib * KIB // (shared + KIB))
            assert held >= wanted, f"{demangled}: {held} on {capability}"
    assert seen == {entry for entry, (_, shared) in sizes.items() if shared <= (limit - 1) * KIB}


def test_gemms_of_sm80_use_tensor_cores_and_asynchronous_copies(extension, cuobjdump, tmp_path):
    """The code has HMMA, LDSM and LDGSTS; all architectures share the source, so one is disassembled, in one dtype."""
    chosen = [path for path in cubins_of_sm80(extension, cuobjdump, "sm_80", tmp_path) if DTYPE in path.read_bytes()]
    assert chosen
    for cubin in chosen:
        for name, code in instructions(output(cuobjdump, "-sass", cubin)).items():
            assert {"HMMA", "LDSM", "LDGSTS"} <= code, name


def test_a_test_can_force_kernels(cuda_variant, extension):
    """Kernels can be forced; a stub replaces torch's CUDA library, so this runs in a process of its own."""
    count = len(gemm_kernels.entries("sm80"))
    program = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
force = ctypes.CDLL(sys.argv[2]).fused_mlp_force_gemms
print(force(b"sm80", -1), force(b"sm80", 0), force(b"sm80", 10**6), force(b"sm81", -1), force(None, -1))
"""
    stub = project.BUILD / ".cache" / cuda_variant.label / "libtorch_cuda.so"
    assert output(sys.executable, "-c", program, stub, extension).split() == [str(count), str(count), "-1", "-1", "0"]
