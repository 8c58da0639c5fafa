"""The package as built: build.toml, tools/build.py, and the Hub's requirements on the files that ship."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, KernelName, Metadata
from kernels.archs import _supports_cuda_capability
from kernels.variants import parse_variant, resolve_variant

import build as build_script
import project
from builder import plan, toolchain

ROOT = project.ROOT
CODE = {".py", ".cpp", ".h", ".inl", ".cu", ".cuh", ".def"}


def repository_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in (ROOT / name for name in names) if path.exists()]


# build.toml


def test_kernel_builder_parses_build_toml():
    assert Build.open(ROOT).general.backends == [Backend.CUDA, Backend.CPU]
    assert KernelName(project.name()).python_name == project.python_name()


def test_build_toml_lists_every_source():
    # kernel-builder sees only listed files.
    config = project.config()
    listed = [source for table in [config["torch"], *config["kernel"].values()] for source in table["src"]]
    sources = [path for folder in ("cpu", "cuda", "torch-ext") for path in (ROOT / folder).rglob("*")]
    sources = [path for path in sources if project.package() not in path.parents]
    found = {path.relative_to(ROOT).as_posix() for path in sources if path.suffix in CODE}
    assert set(listed) == found - {"torch-ext/registration.h"}  # kernel-builder writes it


def test_no_section_shares_statics_between_builds(tmp_path):
    """The flags of build.toml alone keep statics apart: kernel-builder passes none to the C++ compiler behind nvcc."""
    nvcc = toolchain.nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    source, compiled = tmp_path / "statics.cu", tmp_path / "statics.o"
    source.write_text("inline int* f() { static int x; return &x; }\nint* g() { return f(); }\n")
    for section in plan.variant("cuda", nvcc).sections[1:]:
        command = [nvcc.path, f"-ccbin={toolchain.cxx()}", *section.cuda_flags, "-c", source, "-o", compiled]
        subprocess.run(command, check=True)
        symbols = subprocess.run(["nm", compiled], capture_output=True, text=True, check=True).stdout
        assert re.findall(r" (\w) _ZZ1fvE1x", symbols) == ["V"], section.name  # not u, which is unique per process


@pytest.mark.parametrize("backend", ["CPU", "CUDA", "METAL", "XPU"])
def test_a_backend_without_ops_does_not_compile(backend):
    includes = [f"-I{toolchain.torch('2.11') / 'include'}", f"-I{toolchain.python_include()}", "-Itools/builder"]
    command = [toolchain.cxx(), "-std=c++20", "-E", f"-D{backend}_KERNEL", *includes, "torch-ext/torch_binding.cpp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ("there are ops for CPUs and for CUDA alone" in done.stderr) == (backend in ("METAL", "XPU"))


# The capabilities that kernel-builder builds for with each toolkit, and the GPUs supported by its variant's torch.
KNOWN = {
    "12.6": ["7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0"],
    "13.0": ["7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "11.0", "12.0", "12.1"],
}
KNOWN["13.2"] = KNOWN["13.0"]
GPUS = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)]


@pytest.mark.parametrize("cuda", KNOWN)
def test_every_variant_takes_every_gpu_since_ampere(cuda, fused_mlp, monkeypatch):
    """The loader and the package accept all GPUs since Ampere. Hopper has its own code, the oldest toolkit's variant
    PTX.
    """
    archs = plan.variant("cuda", toolchain.Nvcc("nvcc", cuda, frozenset(KNOWN[cuda]))).archs
    assert [gpu for gpu in GPUS if not _supports_cuda_capability(archs, gpu)] == []
    assert not _supports_cuda_capability(archs, (7, 5))
    assert "9.0a" in archs
    native = sys.modules[f"{fused_mlp.__name__}.backends.native"]
    monkeypatch.setitem(native.BUILT_FOR, "archs", archs)
    for gpu in GPUS:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda index, gpu=gpu: gpu)
        assert native._gpu_refusal(0) is None


@pytest.mark.parametrize(
    ("listed", "known", "chosen"),
    [
        (["8.0"], ["8.0", "8.6", "9.0"], ["8.0"]),  # machine code runs only within its major version
        (["8.6", "8.0"], ["8.9", "8.0"], ["8.0", "8.6"]),
        (["8.0+PTX"], ["9.0", "12.0"], ["8.0+PTX"]),
        (["8.0+PTX", "12.0"], ["9.0", "12.0"], ["8.0+PTX", "12.0"]),
        (["9.0", "9.0a"], ["9.0"], ["9.0a"]),  # code for exactly this GPU replaces it
        (["9.0", "10.0f"], ["9.0", "12.0"], ["9.0"]),
        (["12.0+PTX"], ["9.0"], []),
    ],
)
def test_capabilities_are_chosen_as_kernel_builder_does(listed, known, chosen):
    assert plan.chosen(listed, known) == chosen


def test_repo_id_stands_in_build_toml_alone():
    shown = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples/recipes").glob("*/*.py")}
    documents = {"build.toml", "README.md", *shown}  # users copy these
    holders = {
        path.relative_to(ROOT).as_posix()
        for path in repository_files()
        if path.is_file() and project.repo_id().encode() in path.read_bytes()
    }
    assert holders <= documents


# The parts of the set-up that need no network


def make(folder: Path, *arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, **options)


def test_a_checkout_with_spaces_in_its_path_is_one_line(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    done = make(folder, "build")
    assert done.returncode == 2
    assert re.fullmatch(r"Makefile:\d+: \*\*\* the path of this checkout has spaces, .*\n", done.stderr)


def test_a_read_only_checkout_is_one_line():
    """A read-only checkout gives a one-line error. Permissions do not restrict root, so another user runs make."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requirements").mkdir()
        (folder / "requirements/build.txt").touch()
        shutil.copy(ROOT / "Makefile", folder)
        folder.chmod(0o555)
        done = make(folder, "build", user=65534 if os.geteuid() == 0 else None)
        folder.chmod(0o755)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {name} is read-only") and "python3-venv" not in done.stderr


def test_the_backend_can_be_named():
    listed = make(ROOT, "--dry-run", "build", "BACKEND=cuda", "CUDA_ARCHS=8.0 9.0a").stdout
    assert "tools/build.py --backend cuda --cuda-archs 8.0 9.0a\n" in listed


def install(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools/install.py", *arguments]
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_no_network_is_one_line():
    done = install("no-such-package-at-all", PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1")
    assert "error: pip reaches no package index: is there a network" in one_line_error(done)


# The files that ship


def test_nothing_that_ships_is_a_link():
    # Nix drops links from what it builds.
    assert not [path for path in (ROOT / "torch-ext").rglob("*") if path.is_symlink()]


# The local build


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_variant_is_laid_out_for_the_loader(backend, request):
    variant = plan.variant(backend) if backend == "cpu" else request.getfixturevalue("cuda_variant")
    folder = project.BUILD / variant.label
    assert folder.is_dir(), "not built: run `make build`"
    metadata = Metadata.read_from_file(folder / "metadata.json")
    assert metadata.id == variant.id, "the build is older than the sources: run `make build`"
    assert (str(metadata.name), metadata.version) == (project.name(), project.version())
    assert metadata.license == "Apache-2.0"
    assert metadata.source == project.config()["general"]["source"]
    assert metadata.backend.backend_type == Backend.from_str(backend)
    assert metadata.backend.archs == (variant.archs or None)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
    files = set(metadata.digest.files)
    assert files == {"_ops.py", f"{variant.id}.abi3.so"} | set(plan.package_files())


@pytest.mark.parametrize(
    ("cuda", "gpu", "metal", "machine", "loaded"),
    [
        (None, False, False, ("Linux", "x86_64"), ""),  # the folder of all variants: `kernels` finds the CPU's
        ("13.0", True, False, ("Linux", "x86_64"), ""),
        ("13.0", False, False, ("Linux", "x86_64"), "torch-stable-abi211-cpu-x86_64-linux"),
        ("13.0", False, False, ("Linux", "aarch64"), "torch-stable-abi211-cpu-aarch64-linux"),
        (None, False, True, ("Darwin", "arm64"), "torch-stable-abi211-cpu-aarch64-darwin"),
    ],
)
def test_which_build_is_loaded(tmp_path, monkeypatch, cuda, gpu, metal, machine, loaded):
    """Without a GPU, or with a Mac's, the build to load is the CPU variant of a fetched release."""
    for name in ("cpu-x86_64-linux", "cpu-aarch64-linux", "cpu-aarch64-darwin", "cu130-x86_64-linux"):
        (tmp_path / f"torch-stable-abi211-{name}").mkdir()
    monkeypatch.setattr(project, "BUILD", tmp_path)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: metal)
    monkeypatch.setattr("platform.system", lambda: machine[0])
    monkeypatch.setattr("platform.machine", lambda: machine[1])
    assert project.loadable_build() == tmp_path / loaded
    if metal:  # a Mac's GPU has no variant of its own
        monkeypatch.setattr("platform.mac_ver", lambda: ("26.0", ("", "", ""), "arm64"))
        names = [parse_variant(path.name) for path in tmp_path.iterdir()]
        assert resolve_variant(names)[0] is None
        assert resolve_variant(names, "cpu")[0].variant_str == loaded


# tools/build.py, on a small project of its own

BUILD_TOML = """
[general]
name = "two-times"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["cuda", "cpu"]

[general.hub]
repo-id = "someone/two-times"

[torch]
src = ["torch-ext/torch_binding.cpp"]

[torch.stable-abi]
cuda = "2.11"
cpu = "2.11"

[kernel.cpu]
backend = "cpu"
depends = ["torch"]
cxx-flags = ["-DFACTOR=2"]
include = ["headers"]
src = ["native/twice.cpp", "headers/twice.h"]

[kernel.cuda]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = ["8.0", "9.0+PTX"]
cxx-flags = ["-DFACTOR=2"]
include = ["headers"]
src = ["native/twice.cpp", "headers/twice.h"]

[kernel.hopper]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = ["9.0a"]
cuda-flags = ["-DHOPPER"]
src = ["native/hopper.cu"]
"""

SOURCES = {
    "build.toml": BUILD_TOML,
    "headers/twice.h": "#include <cstdint>\nint64_t twice(int64_t x);\n",
    "native/twice.cpp": "#include <twice.h>\nint64_t twice(int64_t x) { return FACTOR * x; }\n",
    "native/hopper.cu": "#ifdef HOPPER\n__global__ void hopper() {}\n#endif\n",
    "torch-ext/torch_binding.cpp": """
#include <torch/csrc/stable/library.h>

#include "registration.h"

int64_t twice(int64_t x);

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("twice(int x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("twice", TORCH_BOX(&twice));
}
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
""",
    "torch-ext/two_times/__init__.py": "from ._ops import ops\n\ntwice = ops.twice\n",
}


class SmallProject:
    def __init__(self, root: Path):
        self.root = root
        shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for place, text in SOURCES.items():
            self.write(place, text)

    def write(self, place: str, text: str) -> None:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def build(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "tools/build.py", *(arguments or ("--backend", "cpu"))]
        return subprocess.run(
            command, cwd=self.root, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
        )

    def metadata(self, out: str = "build", variant: str = "*-cpu-*") -> dict:
        (path,) = (self.root / out).glob(f"{variant}/metadata.json")
        return json.loads(path.read_text())


@pytest.fixture
def small(tmp_path) -> SmallProject:
    return SmallProject(tmp_path / "small")


def compiled(result: subprocess.CompletedProcess) -> list[str]:
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(re.findall(r"^\[\d+/\d+\] (.*)$", result.stdout, re.MULTILINE))


def one_line_error(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1
    assert re.fullmatch(r"error: .*\n", result.stderr), result.stderr
    return result.stderr


def test_builds_again_only_what_changed(small):
    assert compiled(small.build()) == ["cpu: link", "cpu: native/twice.cpp", "cpu: torch-ext/torch_binding.cpp"]
    first = small.metadata()
    assert compiled(small.build()) == []
    assert small.metadata() == first
    small.write("torch-ext/two_times/__init__.py", "from ._ops import ops\n\ndouble = ops.twice\n")
    assert compiled(small.build()) == ["cpu: link", "cpu: torch-ext/torch_binding.cpp"]  # the source with the id
    second = small.metadata()
    small.write("headers/twice.h", SOURCES["headers/twice.h"] + "// changed\n")
    assert "cpu: native/twice.cpp" in compiled(small.build())
    assert len({first["id"], second["id"], small.metadata()["id"]}) == 3


@pytest.mark.parametrize(
    ("asked", "nvcc", "gpu", "wanted"),
    [
        (None, True, True, ["cuda", "cpu"]),
        (None, True, False, ["cpu"]),
        (None, False, True, ["cpu"]),
        (None, False, False, ["cpu"]),
        (["cuda"], True, False, ["cuda"]),
        (["all"], True, False, ["cuda", "cpu"]),
        (["all"], False, False, ["cpu"]),
    ],
)
def test_what_is_built_by_default(monkeypatch, capsys, asked, nvcc, gpu, wanted):
    """CUDA is built if there is a GPU or on request; one line names a variant that is left out but could be built."""
    monkeypatch.setattr(toolchain, "has_gpu", lambda: gpu)
    assert build_script.wanted(asked, ["cuda", "cpu"], nvcc) == wanted
    said = capsys.readouterr().out
    assert ("no GPU here: not building for CUDA, which `make build BACKEND=cuda` does" in said) == (
        asked is None and nvcc and not gpu
    )
    assert ("not building for the GPU" in said) == (gpu and not nvcc)


def test_a_build_beside_another_says_that_it_waits(small):
    cache = small.root / "build/.cache"
    cache.mkdir(parents=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-u", "tools/build.py", "--backend", "cpu"]
        with subprocess.Popen(command, cwd=small.root, stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout.readline() == f"another build is writing to {cache.parent}: waiting for it\n"
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert "torch-stable-abi211-cpu" in waiting.stdout.read()
        assert waiting.returncode == 0


def test_a_folder_that_cannot_be_written_is_one_line(small):
    small.write("file", "no folder")
    assert "cannot write to " in one_line_error(small.build("--backend", "cpu", "--out", "file"))


def test_id_is_that_of_the_sources(small, tmp_path):
    script = "from builder import plan; print(plan.variant('cpu').id)"

    def identifier(root: Path) -> str:
        return subprocess.check_output([sys.executable, "-c", script], cwd=root / "tools", text=True).strip()

    assert re.fullmatch(r"_two_times_cpu_[0-9a-f]{10}", identifier(small.root))
    assert identifier(SmallProject(tmp_path / "copy").root) == identifier(small.root)


def test_sections_of_one_backend_have_their_own_archs_and_flags(small):
    nvcc = toolchain.nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    compiled(small.build("--backend", "cuda"))
    assert small.metadata(variant="*-cu*")["backend"] == {"type": "cuda", "archs": ["8.0", "9.0+PTX", "9.0a"]}
    (extension,) = (small.root / "build").glob("*-cu*/*.so")
    code = extension.read_bytes()
    assert b"hopper" in code and b"libtorch_cuda.so" in code


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler: 'no-such-compiler'"),
        ({"CXX": "false"}, "did not compile"),
    ],
)
def test_a_compiler_that_is_missing_or_fails_is_one_line(small, environment, message):
    assert message in one_line_error(small.build(**environment))


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        ("native/twice.cpp", "int64_t twice(", "did not compile"),
        ("native/twice.cpp", "", "did not compile"),  # twice is declared but not defined
        ("build.toml", BUILD_TOML.replace("native/twice.cpp", "native/absent.cpp"), "native/absent.cpp, which"),
        ("build.toml", BUILD_TOML.replace('cpu = "2.11"', 'cpu = "99.0"'), "is too old"),
    ],
)
def test_sources_that_do_not_build_are_one_line(small, place, text, message):
    small.write(place, text)
    assert message in one_line_error(small.build())
