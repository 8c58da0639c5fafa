"""The compiled CUDA extension, as it lies in build/: no GPU is needed to look at its machine code."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

import gemm_kernels
import project
from builder import plan, toolchain

MIB = 2**20
# What every machine with this torch has. torch brings the CUDA libraries; the extension itself asks for none.
LIBRARIES = r"lib(torch_cuda|torch_cpu|torch|c10|stdc\+\+|gcc_s|m|c|dl|pthread|rt)\.so(\.\d+)?|ld-linux-.*\.so\.\d+"


@pytest.fixture(scope="module")
def variant() -> plan.Variant:
    nvcc = toolchain.nvcc()
    if nvcc is None:
        pytest.skip("no nvcc: there is no CUDA build")
    return plan.variant("cuda", nvcc)


@pytest.fixture(scope="module")
def extension(variant) -> Path:
    found = list((project.BUILD / variant.label).glob("*.abi3.so"))
    assert len(found) == 1, f"{found} in build/{variant.label}: run `make build`"
    return found[0]


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    """Of the CUDA toolkit, where it is whole, else Triton's."""
    folders = [Path(toolchain.nvcc().path).parent]
    if (triton := find_spec("triton")) is not None:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    for folder in folders:
        if (path := shutil.which("cuobjdump", path=str(folder))) is not None:
            return path
    pytest.skip(f"no cuobjdump in {' or '.join(map(str, folders))}")


@pytest.fixture(scope="module")
def hopper_cubins(extension, cuobjdump, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("cubins")
    subprocess.run([cuobjdump, "-xelf", "sm_90a", str(extension)], cwd=folder, capture_output=True, check=True)
    cubins = sorted(folder.glob("*.cubin"))
    assert cubins
    return cubins


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> dict[str, set[str]]:
    """The opcodes of every function, without their modifiers."""
    found = {}
    for function in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        name, code = function.split(maxsplit=1)
        found[name] = set(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)", code, re.MULTILINE))
    return found


def resources(usage: str) -> Iterator[tuple[str, dict[str, int]]]:
    for name, figures in re.findall(r"^ Function (\S+):\n\s+(.*)$", usage, re.MULTILINE):
        yield name, {key: int(value) for key, value in re.findall(r"(STACK|LOCAL):(\d+)", figures)}


@pytest.fixture(scope="module")
def hopper_code(cuobjdump, hopper_cubins) -> dict[str, set[str]]:
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(lambda cubin: output(cuobjdump, "-sass", cubin), hopper_cubins))
    functions = {name: code for text in texts for name, code in instructions(text).items()}
    return {name: code for name, code in functions.items() if "gemm_kernel" in name}


def test_hopper_gemms_use_tensor_cores_and_tma(hopper_code):
    assert {"tiled", "streamed"} == {re.search(r"(tiled|streamed)_gemm_kernel", name)[1] for name in hopper_code}
    for name, code in hopper_code.items():
        assert {"HGMMA", "UTMALDG"} <= code, f"{name} lacks { ({'HGMMA', 'UTMALDG'} - code) }"


def test_hopper_gemms_do_not_spill(hopper_code, cuobjdump, hopper_cubins):
    for name, code in hopper_code.items():
        assert not {"LDL", "STL"} & code, f"{name} uses local memory"
    used = [entry for cubin in hopper_cubins for entry in resources(output(cuobjdump, "-res-usage", cubin))]
    assert {name for name, _ in used} >= set(hopper_code)
    for name, figures in used:
        assert figures == {"STACK": 0, "LOCAL": 0}, f"{name}: {figures}"


def test_code_for_every_arch_is_there(variant, extension, cuobjdump):
    cubins = re.findall(r"sm_(\d+[af]?)\.cubin", output(cuobjdump, "-lelf", extension))
    ptx = re.findall(r"sm_(\d+[af]?)\.ptx", output(cuobjdump, "-lptx", extension))
    wanted = [arch.replace(".", "").removesuffix("+PTX") for arch in variant.archs]
    assert set(wanted) <= set(cubins)
    assert {arch.replace(".", "").removesuffix("+PTX") for arch in variant.archs if arch.endswith("+PTX")} == set(ptx)
    # A cubin may be there and empty, as those of the linker are.
    for arch in wanted:
        usage = output(cuobjdump, "-arch", f"sm_{arch}", "-res-usage", extension)
        assert any("pointwise_kernel" in name or "gemm_kernel" in name for name, _ in resources(usage)), arch


def test_extension_is_small(extension):
    assert extension.stat().st_size <= 10 * MIB


def test_extension_needs_torch_and_the_system_alone(extension):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "--dynamic", "--wide", extension))
    assert "libtorch_cpu.so" in needed
    assert [library for library in needed if not re.fullmatch(LIBRARIES, library)] == []


def test_the_kernels_are_those_of_the_list(extension):
    assert gemm_kernels.built(extension) == gemm_kernels.listed()
