"""The tools that build for several versions of CUDA and test several of torch: their parts that need no network."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

import forks
import project
from builder import compile, device, plan, toolchain, toolkits
from builder.toolchain import BuildError
from compatibility import compat, matrix


def test_every_toolkit_is_pinned_to_its_version():
    versions = toolkits.versions()
    assert {"12.6", "12.8", "13.0", "13.2"} <= set(versions)
    for version in versions:
        text = (toolkits.REQUIREMENTS / f"cuda{version.replace('.', '')}.txt").read_text()
        pins = [line for line in text.splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins)
        compilers = [pin for pin in pins if re.match(r"nvidia-cuda-(nvcc|nvrtc)", pin)]
        assert compilers and all(pin.partition("==")[2].startswith(f"{version}.") for pin in compilers)


@pytest.fixture(scope="module", params=["cuda", "cuda_experts", "cuda_sm80", "cuda_sm90"])
def section(request, cuda_variant):
    """A section of the CUDA build, and the kernels in the object file of each of its sources."""
    (found,) = [each for each in cuda_variant.sections if each.name == request.param]
    folder = project.BUILD / ".cache" / cuda_variant.label / found.name
    return found, [device.kernels(folder / f"{source}.o") for source in found.sources if source.endswith(".cu")]


def test_the_kernels_of_an_object_file(section):
    for names in section[1]:
        assert all(re.match(r"fused_mlp::[\w:]+_kernel(<.*>)?$", name) for name in names)
        assert len(names) == len(set(names)) > 0


def test_headers_alone_have_all_that_kernels_are_named_by(section, tmp_path):
    """All names in kernel names come from headers, so a device-code compiler has them; all headers compile together."""
    found, kernels = section
    headers = device.device_headers(found)
    named = sorted(set(re.findall(r"(?:\w+::)+\w+", " ".join(itertools.chain(*kernels)))))
    lines = [f'#include "{header}"' for header in headers]
    lines += [f"namespace place_{number} {{ using ::{name}; }}" for number, name in enumerate(named)]
    (tmp_path / "all.cu").write_text("\n".join(lines))
    options = ["-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90", "-ptx", "-o", "all.ptx"]
    command = [toolchain.nvcc().path, *options, "all.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


def test_the_kernels_are_told_from_other_functions(tmp_path):
    (tmp_path / "kernels.cpp").write_text("""
namespace some {
namespace {
struct Op {};
}
template <typename T, int N> void pointwise_kernel(T) {}
template <typename T> void no_kernel_at_all(T) {}
void plain_kernel(int) {}
template void pointwise_kernel<Op, 3>(Op);
template void pointwise_kernel<float, 1>(float);
template void no_kernel_at_all<int>(int);
}
""")
    command = [toolchain.cxx(), "-c", "kernels.cpp", "-o", "kernels.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    names = device.kernels(tmp_path / "kernels.o")
    assert names == [
        "some::plain_kernel",
        "some::pointwise_kernel<float, 1>",
        "some::pointwise_kernel<some::(anonymous namespace)::Op, 3>",
    ]


def test_what_ptxas_says_of_the_kernels():
    assert device.losses("""
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining accumulator registers of a wgmma in the function '_Z5firstv'
ptxas info    : Function properties for _Z5firstv
    0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Function properties for _Z6secondv
    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
""") == (20, 1)


@pytest.mark.skipif(not shutil.which(matrix.AARCH64_COMPILER), reason="needs Debian's g++-aarch64-linux-gnu")
def test_the_cpu_variant_compiles_for_aarch64(tmp_path, monkeypatch):
    """Files with code for x86-64 compile for AArch64; `make matrix` compiles all files."""
    whole = plan.variant("cpu")
    (section,) = (each for each in whole.sections if each.name == "cpu")
    sources = [source for source in section.sources if "__x86_64__" in (project.ROOT / source).read_text()]
    assert sources
    asking = dataclasses.replace(whole, sections=(dataclasses.replace(section, sources=tuple(sources)),))
    monkeypatch.setattr(plan, "variant", lambda backend: asking)
    monkeypatch.setattr(matrix, "OUT", tmp_path)
    monkeypatch.setattr(compile, "FLAGS", [flag for flag in compile.FLAGS if flag != "-O3"])  # halves the time
    row = matrix.aarch64(jobs=2)
    assert not row.failed, row.findings
    machines = {
        re.search(r"Machine: +(\S+)", subprocess.check_output(["readelf", "-h", path], text=True))[1]
        for path in tmp_path.rglob("*.o")
    }
    assert machines == {"AArch64"}


def test_code_of_another_machine_is_told(tmp_path, monkeypatch):
    """The row reports the cross-compiler's error about an include of x86 intrinsics outside of its #if."""
    compiler = tmp_path / matrix.AARCH64_COMPILER
    compiler.write_text("#!/bin/sh\necho 'cpu/ops/ops.cpp:1: fatal error: immintrin.h: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    row = matrix.aarch64(jobs=2)
    assert row.failed and all("immintrin.h: no such file" in found for found in row.findings)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(BuildError, match="install g\\+\\+-aarch64-linux-gnu"):
        matrix.aarch64(jobs=2)


def test_an_object_file_without_kernels(tmp_path):
    source, compiled = tmp_path / "empty.cpp", tmp_path / "empty.o"
    source.write_text("int nothing() { return 0; }\n")
    subprocess.run([toolchain.cxx(), "-c", str(source), "-o", str(compiled)], check=True)
    with pytest.raises(BuildError, match="no kernels in"):
        device.kernels(compiled)


def test_the_newest_of_each_minor_version_of_torch():
    versions = ["2.9.1", "2.11.0", "2.12.0", "2.12.1", "2.10.0", "3.0.0", "2.12.10"]
    assert compat.newest_of_each_minor(versions, "2.11") == ["2.11.0", "2.12.10", "3.0.0"]
    assert compat.oldest() == "2.11"


def smoke(script: str, backend: str, local_kernels: str) -> dict:
    environment = {**os.environ, "LOCAL_KERNELS": local_kernels, "HF_HUB_OFFLINE": "1"}
    done = forks.run(compat.SMOKES / script, project.repo_id(), str(project.version()), backend, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_smoke_of_this_torch():
    found = smoke("smoke.py", "cpu", project.local_kernels())["found"]
    assert found == dict.fromkeys(("load", "forward", "backward", "compiled", "fused"))
    assert compat._words(found) == "loads, computes"


def test_smoke_of_a_kernel_that_is_not_there(tmp_path):
    found = smoke("smoke.py", "cpu", f"{project.repo_id()}={tmp_path}")["found"]
    assert found.keys() == {"load"} and found["load"] is not None
    row = compat.Row(("2.11.0", "none", compat._words(found), ""), True)
    assert found["load"] in compat.document([row], [])


def test_smoke_of_this_transformers():
    found = smoke("models.py", "cpu", project.local_kernels())
    assert found == {"wants": None, "fuse_mlps": None, "register_experts": None}


def test_smoke_tells_a_model_that_is_left_as_it_was(monkeypatch):
    monkeypatch.syspath_prepend(str(compat.SMOKES))
    import models

    class Nothing:
        @staticmethod
        def fuse_mlps(model):
            return SimpleNamespace(fused=[])

    assert models.fuse_mlps(Nothing) == "did nothing"


def test_smoke_tells_a_wrong_result(monkeypatch):
    monkeypatch.syspath_prepend(str(compat.SMOKES))
    import smoke as trials
    import torch

    class Wrong:
        @staticmethod
        def gated_mlp(*operands, activation):
            return trials.exact(*operands) * 1.001

    assert "relative error" in trials.error_of(lambda: trials.forward(Wrong, "cpu"))
    assert trials.error_of(lambda: trials.close(torch.ones(3), torch.ones(3).double())) is None
