"""Compiles a variant's extension. A generated build.ninja rebuilds only what changed and shows progress."""

import io
import math
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ninja

import project

from . import toolchain
from .plan import Section, Variant
from .toolchain import BuildError, Nvcc

CXX_SUFFIXES = {".cpp", ".cc", ".cxx"}
FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", "-DPy_LIMITED_API=0x03090000"]
# GCC 12 warns that the value of an empty std::optional is uninitialized.
HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-maybe-uninitialized"]
# Two builds in one process must not share the statics of inline functions. kernel-builder also adds this only to C++.
CXX_FLAGS = ["-fno-gnu-unique"]
NOT_OF_CLANG = {"-fno-gnu-unique", "-Wno-maybe-uninitialized"}
# Average core seconds per file, measured on a Xeon of 2023. A build estimates its duration from them.
CORE_SECONDS = {"cpu": 3.5, "cuda": 17}
# Every symbol must be defined at link time (registration.h exempts Python's); those of static libraries stay hidden.
LINK_FLAGS = ["-z", "defs", "--exclude-libs", "ALL"]


def compile(variant: Variant, cache: Path, nvcc: Nvcc | None, jobs: int) -> Path:
    """Builds what is out of date in the folder `cache` and returns the extension."""
    cache.mkdir(parents=True, exist_ok=True)
    compiler = _Compiler(variant, toolchain.cxx(), nvcc, toolchain.torch(variant.stable_abi), jobs)
    script, extension = cache / "build.ninja", cache / "extension.so"
    if nvcc is not None:
        _write(cache / "libtorch_cuda.cpp", _torch_cuda_stub(compiler.torch / "include"))
    # Relative paths: compiled files stay up to date if the tree is copied to another folder.
    script.write_text(_script(compiler, Path(os.path.relpath(cache, project.ROOT)), extension.name))
    command = [os.path.join(ninja.BIN_DIR, "ninja"), "-f", str(script), "-j", str(jobs)]
    _announce(variant, [*command, "-n"], jobs)
    if subprocess.run(command, cwd=project.ROOT).returncode != 0:
        raise BuildError(f"{variant.label} did not compile: the compiler's messages are above")
    return extension


def _announce(variant: Variant, dry_run: list[str], jobs: int) -> None:
    """Prints how long the build will take, if that is long."""
    done = subprocess.run(dry_run, cwd=project.ROOT, capture_output=True, text=True)
    steps = len(re.findall(rf"^\[\d+/\d+\] {variant.backend}: ", done.stdout, re.MULTILINE))
    minutes = math.ceil(steps * CORE_SECONDS[variant.backend] / jobs / 60)
    if steps * CORE_SECONDS[variant.backend] / jobs > 20:
        cores = f"{jobs} idle core{'s' if jobs != 1 else ''}"
        print(f"{variant.label}: {steps} files to compile and link, about {minutes} min on {cores}", flush=True)


def check_syntax(variant: Variant, section: Section, source: str, includes: list[Path]) -> None:
    """Checks the syntax of a CUDA variant's C++ file with the headers of a toolkit that has no nvcc."""
    compiler = _Compiler(variant, toolchain.cxx(), None, toolchain.torch(variant.stable_abi), 1)
    headers = [part for include in includes for part in ("-isystem", str(include))]
    command = [*compiler.object(section, source), *headers, "-fsyntax-only", source]
    result = subprocess.run(command, cwd=project.ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(next((line for line in result.stderr.splitlines() if "error" in line), result.stderr))


def cross_compile(variant: Variant, section: Section, source: str, cxx: list[str], without: set[str], out: Path) -> int:
    """Compiles a C++ file with a cross-compiler, without a torch to link with. Returns the bytes.

    `without` are the flags that this compiler does not know.
    """
    compiler = _Compiler(variant, cxx[0], None, toolchain.torch(variant.stable_abi), 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    first, *flags = compiler.object(section, source)
    command = [first, *cxx[1:], *(flag for flag in flags if flag not in without), "-c", source, "-o", str(out)]
    result = subprocess.run(command, cwd=project.ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(next((line for line in result.stderr.splitlines() if "error" in line), result.stderr))
    return out.stat().st_size


@dataclass(frozen=True)
class _Compiler:
    """The command lines of a variant: g++ for the CPU; for CUDA nvcc, which calls g++."""

    variant: Variant
    cxx: str
    nvcc: Nvcc | None
    torch: Path
    jobs: int

    @property
    def threads(self) -> int:
        # The number of capabilities that one nvcc compiles for at a time: more than one if there are more cores than
        # files. Compiling files in parallel uses the cores better (measured: 40 s against 48 s on 2).
        files = [source for section in self.variant.sections for source in section.sources if source.endswith(".cu")]
        return max(1, self.jobs // len(files))

    def object(self, section: Section, source: str) -> list[str]:
        major, minor = (int(part) for part in self.variant.stable_abi.split("."))
        flags = [*FLAGS, f"-D{self.variant.backend.upper()}_KERNEL"]
        flags += [f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}"]
        flags += [f"-I{include}" for include in (Path(__file__).parent.relative_to(project.ROOT), *section.include)]
        flags += ["-isystem", f"{self.torch}/include", "-isystem", str(toolchain.python_include())]
        if section.name == "torch":  # only this section sees the id, so that a new id does not recompile everything
            flags += [f"-DTORCH_EXTENSION_NAME={self.variant.id}"]
        is_cuda = source.endswith(".cu")
        host_flags = HOST_FLAGS if is_cuda else [*HOST_FLAGS, *CXX_FLAGS, *section.cxx_flags]
        if self.variant.backend == "cuda":
            flags.append("-DUSE_CUDA=1")
        if self.nvcc is None:
            return [self.cxx, *flags, *host_flags]
        command = [self.nvcc.path, f"-ccbin={self.cxx}", *flags]
        command += [f"-Xcompiler={flag}" for flag in host_flags]
        if is_cuda:
            command += ["--expt-relaxed-constexpr", f"--threads={self.threads}"]
            # Two builds must be identical byte for byte: no process ids in the names of nvcc's intermediate files, and
            # no path of this checkout in the hash that names anonymous namespaces.
            command += ["--objdir-as-tempdir", f"-Xcudafe=--orig_src_path_name={source}"]
            command += [*_gencode(section), *section.cuda_flags]
        return command

    def link(self, extension: Path, objects: list[Path], stubs: list[Path]) -> list[str]:
        command = [self.cxx] if self.nvcc is None else [self.nvcc.path, f"-ccbin={self.cxx}", "-cudart=static"]
        command += ["-shared", "-o", str(extension), *map(str, objects), f"-L{self.torch}/lib", "-ltorch_cpu", "-lc10"]
        flags = ["--no-as-needed", *map(str, stubs), *LINK_FLAGS]
        return command + [part for flag in flags for part in ("-Xlinker", flag)]

    def link_stub(self, stub: Path, source: Path) -> list[str]:
        return [self.cxx, "-shared", "-fPIC", "-Xlinker", "-soname=libtorch_cuda.so", "-o", str(stub), str(source)]


def _script(compiler: _Compiler, cache: Path, extension: str) -> str:
    script = ninja.Writer(io.StringIO(), width=math.inf)

    def build(output: Path, rule: str, inputs: list[str | Path], command: list[str]) -> Path:
        paths = [ninja.escape(str(path)) for path in (output, *inputs)]
        script.build(paths[0], rule, paths[1:], variables={"run": ninja.escape(shlex.join(command))})
        return output

    backend = compiler.variant.backend
    script.variable("builddir", ninja.escape(str(cache)))
    script.rule("compile", "$run -MD -MF $out.d -c $in -o $out", f"{backend}: $in", depfile="$out.d", deps="gcc")
    script.rule("link", "$run", f"{backend}: link")
    objects = [
        build(cache / section.name / f"{source}.o", "compile", [source], compiler.object(section, source))
        for section in compiler.variant.sections
        for source in section.sources
        if source.endswith(".cu") or Path(source).suffix in CXX_SUFFIXES
    ]
    stubs = []
    if compiler.nvcc is not None:
        stub, source = cache / "libtorch_cuda.so", cache / "libtorch_cuda.cpp"
        stubs = [build(stub, "link", [source], compiler.link_stub(stub, source))]
    build(cache / extension, "link", objects + stubs, compiler.link(cache / extension, objects, stubs))
    return script.output.getvalue()


def _torch_cuda_stub(include: Path) -> str:
    """The source of a stub with the shims of libtorch_cuda.so, to link with if torch is CPU-only."""
    shims = ["torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h"]
    text = "".join((include / shim).read_text() for shim in shims)
    declared = "".join(re.findall(r"#ifdef USE_CUDA(.*?)#endif // USE_CUDA", text, re.DOTALL))
    declared += (include / "torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h").read_text()
    names = set(re.findall(r"\b(?:aoti_)?torch_\w+(?=\()", declared))
    return "".join(f'extern "C" void {name}() {{}}\n' for name in sorted(names))


def _gencode(section: Section) -> Iterator[str]:
    for arch in section.archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        yield f"-gencode=arch=compute_{number},code=sm_{number}"
        if arch.endswith("+PTX"):
            yield f"-gencode=arch=compute_{number},code=compute_{number}"


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:  # an untouched file stays up to date
        path.write_text(text)
