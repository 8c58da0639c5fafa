"""The checks before a release pass on this tree, and each fails on the fault that it looks for."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from sigstore.errors import VerificationError
from torch import nn

import checkout
import project
import release
from builder import abi, mach_o
from hub import Hub
from releasing import check, dry_run, publish, rebuild, signature
from releasing.rules import api, layers, sources, variants


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A clean checkout of this tree, built."""
    folder = checkout.make(tmp_path_factory.mktemp("released"))
    checkout.build(folder)
    return folder


@pytest.fixture
def build(released, tmp_path) -> Path:
    """A copy of its build, for planting faults."""
    return shutil.copytree(released / "build", tmp_path / "build", ignore=shutil.ignore_patterns(".cache"))


@pytest.fixture
def variant(build) -> Path:
    (folder,) = variants.variants(build)
    return folder


# The API


def stand_in(kernel: ModuleType) -> ModuleType:
    """A copy of the kernel's module that a test may change."""
    module = ModuleType(kernel.__name__)
    vars(module).update(vars(kernel), __all__=[*kernel.__all__])
    module.layers = ModuleType("layers")
    vars(module.layers).update(vars(kernel.layers), __all__=[*kernel.layers.__all__])
    return module


def test_the_api_is_that_of_the_snapshot(fused_mlp):
    assert api.faults(fused_mlp) == []


def layer(**flags):
    class GatedMLP(nn.Module):
        has_backward = can_torch_compile = True

        def forward(self, x):
            return x

    for name, value in flags.items():
        setattr(GatedMLP, name, value)
    return GatedMLP


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"softmax": lambda x, dim=-1: x}, "+ softmax(x, dim=-1)"),
        ({"swiglu": None}, "- swiglu(gate, up)"),
        (
            {"act_and_mul": lambda gate, up, activation="silu": gate},
            "+ act_and_mul(gate, up, activation='silu')",
        ),
        ({"swiglu": lambda gate, x: gate}, "+ swiglu(gate, x)"),
        (
            {"layers.GatedMLP": layer(forward=lambda self, x, scale=1.0: x)},
            "+ layers.GatedMLP.forward(self, x, scale=1.0) has_backward=True can_torch_compile=True",
        ),
        (
            {"layers.GatedMLP": layer(has_backward=False)},
            "+ layers.GatedMLP.forward(self, x) has_backward=False can_torch_compile=True",
        ),
        ({"layers.Softmax": nn.Softmax}, "+ layers.Softmax.forward(self, input)"),
    ],
)
def test_a_change_of_the_api_needs_a_new_version(fused_mlp, change, line):
    kernel = stand_in(fused_mlp)
    for name, value in change.items():
        owner = kernel.layers if name.startswith("layers.") else kernel
        name = name.removeprefix("layers.")
        owner.__all__ = [each for each in owner.__all__ if each != name] + [name] * (value is not None)
        setattr(owner, name, value)
    faults = api.faults(kernel)
    assert line in faults
    assert "Raise the version in build.toml, then run `python tools/release.py snapshot`" in faults[-1]


def test_a_change_of_the_ops_needs_a_new_version(fused_mlp):
    library = torch.library.Library(fused_mlp.__name__, "FRAGMENT")
    library.define("softmax(Tensor x) -> Tensor")
    try:
        assert api.faults(fused_mlp)[0] == "+ ops.softmax(Tensor x) -> Tensor"
    finally:
        library._destroy()
    assert api.faults(fused_mlp) == []


def test_a_new_activation_needs_a_new_version(fused_mlp, monkeypatch):
    activations = sys.modules[f"{fused_mlp.__name__}.activations"]
    new = activations.Activation("mish", 9, torch.nn.functional.mish, torch.ones_like)
    monkeypatch.setattr(activations, "ACTIVATIONS", (*activations.ACTIVATIONS, new))
    assert api.faults(fused_mlp)[0] == "+ activation 'mish': 9"


def test_a_new_version_needs_a_snapshot(fused_mlp, monkeypatch):
    monkeypatch.setattr(project, "version", lambda: 99)
    assert "there is no snapshot v99.txt" in api.faults(fused_mlp)[0]


# The Python that ships


def test_what_ships_runs_on_the_oldest_python_and_imports_what_it_may(variant):
    assert sources.faults(variant) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("match x:\n    case 1: pass", "pattern matching needs Python 3.10"),
        ("import tomllib", "'tomllib' module needs Python 3.11"),
        ("zip([1], [2], strict=True)", "'zip(strict)' needs Python 3.10"),
        ("import numpy", "imports numpy: relative imports"),
        ("from fused_mlp.layers import MLP", "imports fused_mlp.layers: relative imports"),
        ("def f():\n    import transformers.models", "imports transformers.models: relative imports"),
        ("import triton", "imports triton: relative imports"),  # has its own folder
    ],
)
def test_python_that_may_not_ship(tmp_path, line, fault):
    (tmp_path / "module.py").write_text(f"x = 1\n{line}\n")
    (found,) = sources.faults(tmp_path)
    assert found.startswith("module.py:") and fault in found
    (tmp_path / "module.py").write_text("x = 1\n")
    assert sources.faults(tmp_path) == []


# The layers


def test_layers_obey_the_hubs_rules(fused_mlp):
    assert layers.faults(fused_mlp) == []


class WithConstructor(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return x


class OfOtherArguments(nn.Module):
    def forward(self, x, scale):
        return scale * x


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (WithConstructor, "must not override nn.Module constructor"),
        (OfOtherArguments, "does not match `GatedMLPLayout`: different number of arguments"),
    ],
)
def test_a_layer_against_the_rules(fused_mlp, layer, fault):
    kernel = stand_in(fused_mlp)
    kernel.layers.GatedMLP = layer
    (found,) = layers.faults(kernel)
    assert fault in found


# The variants


def test_a_clean_build_may_be_released(variant):
    assert variants.faults(variant) == []


def leave_bytecode(variant):
    (variant / "__pycache__").mkdir()
    (variant / "__pycache__/layers.cpython-311.pyc").write_bytes(b"anything")


def metadata(**changes):
    """A function that changes some fields; None removes one."""

    def change(variant):
        path = variant / "metadata.json"
        changed = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))

    return change


def symbols(code: str):
    def link(variant):
        """Replaces the extension by a library that uses something forbidden."""
        command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", next(variant.glob("*.so"))]
        subprocess.run(command, input=code, text=True, check=True)

    return link


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (lambda folder: (folder / "layers.py").write_text(""), "hash mismatch for layers.py"),
        (lambda folder: (folder / "more.py").write_text(""), "more.py"),
        (lambda folder: (folder / "dispatch.py").unlink(), "dispatch.py"),
        (
            metadata(version=project.version() + 1),
            f"is {project.name()} version {project.version() + 1}, and build.toml",
        ),
        (metadata(name="another"), "is another version"),
        (metadata(license="MIT"), "has the licence MIT"),
        (metadata(digest=None), "has no digest"),
        (metadata(provenance={"kernel-builder": {"version": "1"}}), "says not which commit it was built from"),
        (lambda folder: (folder / "metadata.json").write_text("{}"), "missing field"),
        (metadata(backend={"type": "cuda"}), "is for CUDA and names no architectures"),
        (lambda folder: shutil.copy(next(folder.glob("*.so")), folder / "a.abi3.so"), "has 2 extensions, not one"),
        (leave_bytecode, "holds bytecode, which is not to be published: __pycache__/layers.cpython-311.pyc"),
        (symbols('extern "C" void _PyObject_Dump(void*); void f() { _PyObject_Dump(0); }'), "outside Python 3.9 ABI"),
        (symbols("namespace c10 { void f(); } void g() { c10::f(); }"), "outside torch stable ABI: c10::f()"),
        (symbols("inline int* f() { static int x; return &x; } int* g() { return f(); }"), "local statics: f()::x"),
    ],
)
def test_a_variant_with_a_fault(variant, plant, fault):
    plant(variant)
    faults = variants.faults(variant)
    assert any(fault in found for found in faults), faults


def for_macos(*undefined: str, oldest: int = 15) -> bytes:
    """An extension for Macs as far as its checks read it: its undefined symbols and the oldest macOS."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in undefined)
    places = [names.index(name.encode() + b"\0") for name in undefined]
    symbols = b"".join(struct.pack("<IBBHQ", place, 1, 0, 0, 0) for place in places)  # external, undefined here
    commands = struct.pack("<6I", 0x32, 24, 1, oldest << 16, 26 << 16, 0)  # LC_BUILD_VERSION
    end = 32 + len(commands) + 24
    commands += struct.pack("<6I", 0x2, 24, end, len(undefined), end + len(symbols), len(names))  # LC_SYMTAB
    header = struct.pack("<4s7I", mach_o.MAGIC, 0x0100000C, 0, 6, 2, len(commands), 0, 0)  # a library for arm64
    return header + commands + symbols + names


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        (for_macos("_PyModule_Create2", "__ZN5torch6stable6TensorD1Ev", "_aoti_torch_delete_tensor_object"), []),
        (for_macos("__PyObject_Dump"), ["Python 3.9 ABI"]),
        (for_macos("_aoti_torch_get_dtype", "__ZN3c103fooEv"), ["torch stable ABI"]),
        (for_macos(oldest=26), ["macOS 15.0"]),
    ],
)
def test_an_extension_for_macos(tmp_path, content, faults):
    """Extensions for macOS are checked here too, where nm reads only ELF files."""
    extension = tmp_path / "extension.abi3.so"
    extension.write_bytes(content)
    assert [check.name for check in abi.check(extension) if check.failed] == faults


def test_a_variant_of_an_unknown_name(variant):
    (found,) = variants.faults(variant.rename(variant.parent / "jax9-cpu-x86_64-linux"))
    assert "Unknown framework" in found


def test_a_build_of_a_dirty_tree(released):
    readme = released / "README.md"
    committed = readme.read_text()
    readme.write_text(f"{committed}More.\n")
    try:
        (variant,) = variants.variants(checkout.build(released))
        (found,) = variants.faults(variant)
    finally:
        readme.write_text(committed)
        checkout.build(released)
    assert "was built from a tree with changes" in found
    assert variants.faults(variant) == []


# Building again


RECOMPILED = {"torch-ext/global_state/modes.cpp", "cpu/few_rows/matmul.cpp"}  # one of each section


def test_two_builds_of_one_commit_are_the_same(released, tmp_path, monkeypatch):
    """Two builds of a commit are the same. The second is linked in another folder, with two files compiled there and
    the objects of the others copied; `make release-check` compiles all of them.
    """
    monkeypatch.setattr(project, "ROOT", released)
    clone = rebuild.clone(tmp_path / "in" / "another" / "folder")
    for path in released.rglob("*"):
        if (clone / path.relative_to(released)).is_file():
            shutil.copystat(path, clone / path.relative_to(released))
    for source in RECOMPILED:
        (clone / source).touch()
    start = time.time_ns()
    again = checkout.build(clone)
    made = {path for path in again.rglob("*.o") if path.stat().st_mtime_ns >= start}
    assert {f"{source}.o" for source in RECOMPILED} == {
        str(path.relative_to(again / ".cache")).split("/", 2)[2] for path in made
    }
    assert rebuild.faults(released / "build", again) == []


def test_two_builds_that_differ(build, variant, tmp_path):
    other = shutil.copytree(build, tmp_path / "other")
    (extension,) = (other / variant.name).glob("*.so")
    content = bytearray(extension.read_bytes())
    content[-1] ^= 1
    extension.write_bytes(content)
    assert rebuild.faults(build, other) == [f"{variant.name}/{extension.name} differs between two builds of one commit"]
    shutil.rmtree(other / variant.name)
    assert len(rebuild.faults(build, other)) == len(list(variants.files(variant)))


# All together


def test_the_check_of_a_build(build, variant, tmp_path, monkeypatch):
    again = shutil.copytree(build, tmp_path / "again")
    monkeypatch.setattr(rebuild, "clone", lambda folder: folder)
    monkeypatch.setattr(rebuild, "build", lambda checkout: again)

    def checked(build: Path = build) -> tuple[str | None, str]:
        output = StringIO()
        return check.run(build, tmp_path, Console(file=output, width=100)), " ".join(output.getvalue().split())

    error, printed = checked()
    assert error is None
    rows = [f"API as in {api.snapshot().name}", "layers", variant.name, "a second build is the same"]
    assert all(f"{row} ok" in printed for row in rows)

    metadata(version=7)(again / variant.name)
    error, printed = checked()
    assert error == "error: not to be released"
    assert "is the same 1 found" in printed and f"{variant.name}/metadata.json differs between two builds" in printed

    (variant / "more.py").write_text("")
    error, printed = checked()
    assert error == "error: not to be released"
    assert f"{variant.name} 1 found" in printed and "second build" not in printed  # it takes long, so it does not run

    error, _ = checked(tmp_path / "absent")
    assert error.startswith("error: no variants in")


def test_the_gate_before_the_upload(build, variant, monkeypatch):
    monkeypatch.setattr(abi, "MANYLINUX", "manylinux_2_39")  # this machine's C library is newer than releases allow
    output = StringIO()
    console = Console(file=output, width=100)
    assert check.gate(build, {variant.name}, console) is None
    assert check.gate(build, {"torch-stable-abi211-cu130-aarch64-linux"}, console) == "error: not to be released"
    assert "torch-stable-abi211-cu130-aarch64-linux is published on v" in output.getvalue()
    monkeypatch.setattr(abi, "MANYLINUX", "manylinux_2_5")
    assert check.gate(build, set(), console) == "error: not to be released"
    assert "symbols outside manylinux_2_5: " in output.getvalue() and variants.faults(variant) == []
    (variant / "more.py").write_text("")
    monkeypatch.setattr(abi, "MANYLINUX", "manylinux_2_39")
    assert check.gate(build, set(), console) == "error: not to be released"
    assert check.gate(build / "absent", set(), console).startswith("error: no variants in")


def test_a_tag_names_the_version_and_lies_on_main(tmp_path, monkeypatch):
    version, folder = project.version(), tmp_path / "origin"
    folder.mkdir()
    (folder / "file").touch()
    checkout.git(folder, "init", "--quiet", "--initial-branch=main")
    checkout.commit(folder)
    checkout.git(folder, "tag", f"v{version}.0")
    checkout.git(folder, "checkout", "--quiet", "-b", "another")
    (folder / "another").touch()
    checkout.commit(folder)
    checkout.git(folder, "tag", f"v{version}.12")
    checkout.git(folder, "checkout", "--quiet", "main")
    checkout.git(tmp_path, "clone", "--quiet", str(folder), "clone")
    monkeypatch.setattr(project, "ROOT", tmp_path / "clone")
    monkeypatch.setattr(project, "version", lambda: version)
    assert release.check_tag(f"v{version}.12").startswith(f"error: the commit of v{version}.12 is not on origin's main")
    assert (
        release.check_tag(f"v{version}.0") == f"error: v{version}.12 came after v{version}.0: a release goes on from it"
    )
    for repository in (folder, tmp_path / "clone"):
        checkout.git(repository, "tag", "--delete", f"v{version}.12")
    assert release.check_tag(f"v{version}.0") is None
    (folder / "more").touch()
    checkout.commit(folder)
    checkout.git(tmp_path / "clone", "fetch", "--quiet")
    checkout.git(tmp_path / "clone", "tag", f"v{version}.9", "origin/main")
    assert release.check_tag(f"v{version}.9") is None
    checkout.git(tmp_path / "clone", "tag", f"v{version}.10", f"v{version}.0")
    older = f"error: the commit of v{version}.10 is without that of v{version}.9, which it would replace"
    assert release.check_tag(f"v{version}.10") == older
    for tag in (f"v{version}", f"v{version + 1}.0", f"v{version}.0.1", f"{version}.0"):
        assert release.check_tag(tag).startswith(f"error: the tag is {tag}, and build.toml says version {version}")


# Signing itself needs the network and a workflow's identity.


def certificate(**said: str) -> x509.Certificate:
    """A self-signed certificate with the claims that sigstore puts into a workflow's."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), 1)
    builder = builder.not_valid_before(datetime(2026, 1, 1)).not_valid_after(datetime(2027, 1, 1))
    values = {1: said["issuer"].encode()}  # the others are UTF8String in DER
    for name, number in {"issuer": 8, "signer": 9, "source": 12}.items():
        values[number] = bytes([12, len(said[name])]) + said[name].encode()
    for number, value in values.items():
        oid = x509.ObjectIdentifier(f"1.3.6.1.4.1.57264.1.{number}")
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, value), critical=False)
    return builder.sign(key, hashes.SHA256())


def test_whose_signature_counts():
    """Only signatures by the release workflow, for the tag, in our repository, are accepted."""
    ours = project.config()["general"]["source"]
    issuer, path = "https://token.actions.githubusercontent.com", ".github/workflows"
    good = {"issuer": issuer, "source": ours, "signer": f"{ours}/{path}/release.yaml@refs/tags/v1.2"}
    signature.policy("v1.2").verify(certificate(**good))
    for wrong in (
        {"signer": f"{ours}/{path}/release.yaml@refs/heads/main"},
        {"signer": f"{ours}/{path}/release.yaml@refs/tags/v1.1"},
        {"signer": f"{ours}/{path}/build.yaml@refs/tags/v1.2"},
        {"source": f"{ours}-fork"},
        {"issuer": "https://issuer.invalid"},
    ):
        with pytest.raises(VerificationError):
            signature.policy("v1.2").verify(certificate(**{**good, **wrong}))


def test_what_is_not_signed(build, variant):
    def found() -> list[str]:
        return signature.faults(build, "v1.0")

    assert found() == [f"{variant.name}: VerificationResult.SignatureBundleMissing()"]
    (variant / "metadata.json.sigstore").write_text("{}")
    (fault,) = found()
    assert fault.startswith(f"{variant.name}: VerificationResult.SignatureBundleInvalid(")
    assert not any("sigstore" in fault for fault in variants.faults(variant))  # the digest does not cover the signature


# Publishing: as a workflow that the Hub knows, to an existing repository


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub", token="secret", identity="our workflow") as hub:
        hub.repository(project.repo_id())
        yield hub


def published(released: Path, hub: Hub, *command: str, identity: str = "our workflow") -> subprocess.CompletedProcess:
    environment = os.environ | checkout.publisher(hub.url, identity)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # whether a process leaves bytecode is up to the process itself
    return checkout.run(released, "tools/release.py", *command, env=environment)


def files_of(hub: Hub, revision: str) -> dict[str, bytes]:
    repository = hub.repository(project.repo_id())
    entries = repository.tree(repository.resolve(revision), recursive=True)
    return {entry.path: repository.read(entry) for entry in entries if entry.type == "file"}


def test_what_is_published(released, hub, build, variant):
    """Files are first staged, where no user looks, then promoted unchanged, byte for byte."""
    other = shutil.copytree(variant, build / "torch-stable-abi211-cu130-x86_64-linux")
    repository = hub.repository(project.repo_id())
    assert published(released, hub, "stage", "--build", str(build)).returncode == 0
    (variant / "dispatch.py").rename(variant / "choice.py")  # a later build may have other files
    done = published(released, hub, "stage", "--build", str(build))
    assert done.returncode == 0, done.stderr
    staged = done.stdout.strip()
    assert repository.branches().keys() == {"main", publish.STAGING}
    assert repository.branches()[publish.STAGING] == staged
    files = {
        f"build/{folder.name}/{place}": path.read_bytes()
        for folder in variants.variants(build)
        for place, path in variants.files(folder)
    }
    benchmarks = (project.ROOT / "benchmarks").glob("benchmark*.py")
    files |= {f"benchmarks/{path.name}": path.read_bytes() for path in benchmarks}
    assert files_of(hub, staged) == files

    done = published(released, hub, "promote", staged)
    assert done.returncode == 0, done.stderr
    head = repository.branches()[publish.branch()]
    assert done.stdout.strip() == head and files_of(hub, head) == files
    assert files_of(hub, "main") == {"README.md": publish.render_card().encode()}

    # A published variant must not disappear from its version.
    shutil.rmtree(other)
    assert published(released, hub, "stage", "--build", str(build)).returncode == 0
    done = published(released, hub, "promote", publish.STAGING)
    assert done.returncode == 1
    assert f"error: {other.name} is published on v" in done.stderr
    assert "raise the version in build.toml" in done.stderr
    assert repository.branches()[publish.branch()] == head


def test_bytecode_is_not_published(released, hub, build, variant):
    """Bytecode, which no digest covers, is refused; loading a build for its checks leaves none."""
    assert published(released, hub, "snapshot", "--build", str(build)).returncode == 0
    assert not list(build.rglob("*.pyc"))
    leave_bytecode(variant)
    assert published(released, hub, "stage", "--build", str(build)).stderr == (
        f"error: {variant.name} holds bytecode, which is not to be published: __pycache__/layers.cpython-311.pyc\n"
    )
    assert hub.repository(project.repo_id()).branches().keys() == {"main"}


def test_who_may_publish(released, hub, build):
    """Only the workflow that the Hub's repository names may publish, without a right to create repositories."""
    stage = ("stage", "--build", str(build))
    assert "401" in published(released, hub, *stage, identity="another workflow").stderr
    assert "no OIDC id token is available" in published(released, hub, *stage, identity="").stderr
    assert published(released, hub, *stage).returncode == 0
    assert not [request for request in hub.requests if "repos/create" in request]
    shutil.rmtree(hub.folder)
    assert published(released, hub, *stage).returncode == 1
    assert not hub.exists(project.repo_id())


# The rehearsal: its steps are tested above and in test_hub.py.


def test_the_rehearsal_has_a_hub_of_its_own(tmp_path):
    with dry_run._hub(project.ROOT, tmp_path) as (address, _):
        organisation = project.repo_id().split("/")[0]
        with urlopen(f"{address['HF_ENDPOINT']}/api/organizations/{organisation}/overview") as answer:
            assert json.load(answer)["trustedKernelPublisher"] is True


def test_the_rehearsal_stops_where_a_step_fails(tmp_path):
    folder = checkout.make(tmp_path / "broken")
    (folder / "tools/build.py").write_text("import sys\nsys.exit('no compiler')\n")
    checkout.commit(folder)
    (folder / "README.md").write_text("Changed\n")
    done = checkout.run(folder, "tools/release.py", "dry-run")
    assert done.returncode == 1
    assert "what is not committed is not in the release" in done.stdout and "2 of 7: build" in done.stdout
    assert "no compiler" in done.stderr and "error: the rehearsal failed at step 2: build" in done.stderr
    assert "3 of 7" not in done.stdout
