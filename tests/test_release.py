"""The checks before a release: each passes on this tree, and fails on what it is there to find."""

import json
import os
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import pytest
import torch
from rich.console import Console
from torch import nn

import checkout
import project
import release
from hub import Hub
from releasing import api, check, dry_run, layers, publish, rebuild, signature, sources, variants


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A clean checkout of this tree, built."""
    folder = checkout.make(tmp_path_factory.mktemp("released"))
    checkout.build(folder)
    return folder


@pytest.fixture
def build(released, tmp_path) -> Path:
    """A copy of its build, to plant a fault in."""
    return shutil.copytree(released / "build", tmp_path / "build", ignore=shutil.ignore_patterns(".cache"))


@pytest.fixture
def variant(build) -> Path:
    (folder,) = variants.variants(build)
    return folder


def edit(metadata: Path, **changes) -> None:
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes))


# The API


def stand_in(kernel: ModuleType) -> ModuleType:
    """A module like the kernel, to change."""
    module = ModuleType(kernel.__name__)
    vars(module).update(vars(kernel), __all__=[*kernel.__all__])
    module.layers = ModuleType("layers")
    vars(module.layers).update(vars(kernel.layers), __all__=[*kernel.layers.__all__])
    return module


def test_the_api_is_that_of_the_snapshot(fused_mlp):
    assert api.faults(fused_mlp) == []


def add_a_function(kernel):
    kernel.__all__.append("softmax")
    kernel.softmax = lambda x, dim=-1: x


def remove_a_function(kernel):
    kernel.__all__.remove("swiglu")


def change_a_default(kernel):
    kernel.act_and_mul = lambda gate, up, activation="silu": gate


def rename_an_argument(kernel):
    kernel.swiglu = lambda gate, x: gate


def change_a_forward(kernel):
    class GatedMLP(nn.Module):
        has_backward = can_torch_compile = True

        def forward(self, x, scale=1.0):
            return x

    kernel.layers.GatedMLP = GatedMLP


def lose_the_backward(kernel):
    class GatedMLP(nn.Module):
        has_backward, can_torch_compile = False, True

        def forward(self, x):
            return x

    kernel.layers.GatedMLP = GatedMLP


def add_a_layer(kernel):
    kernel.layers.__all__.append("Softmax")
    kernel.layers.Softmax = nn.Softmax


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (add_a_function, "+ softmax(x, dim=-1)"),
        (remove_a_function, "- swiglu(gate, up)"),
        (change_a_default, "+ act_and_mul(gate, up, activation='silu')"),
        (rename_an_argument, "+ swiglu(gate, x)"),
        (change_a_forward, "+ layers.GatedMLP.forward(self, x, scale=1.0) has_backward=True can_torch_compile=True"),
        (lose_the_backward, "+ layers.GatedMLP.forward(self, x) has_backward=False can_torch_compile=True"),
        (add_a_layer, "+ layers.Softmax.forward(self, input)"),
    ],
)
def test_a_change_of_the_api_needs_a_new_version(fused_mlp, change, line):
    kernel = stand_in(fused_mlp)
    change(kernel)
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


class WithMethod(nn.Module):
    def forward(self, x):
        return self.twice(x)

    def twice(self, x):
        return 2 * x


class WithVariable(nn.Module):
    scale = 2

    def forward(self, x):
        return self.scale * x


class OfOtherArguments(nn.Module):
    def forward(self, x, scale):
        return scale * x


class NoModule:
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (WithConstructor, "must not override nn.Module constructor"),
        (WithMethod, "must not contain additional members"),
        (WithVariable, "must not contain additional members"),
        (OfOtherArguments, "does not match `GatedMLPLayout`: different number of arguments"),
        (NoModule, "is not a Torch layer"),
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


def change_a_file(variant):
    (variant / "layers.py").write_text("")


def add_a_file(variant):
    (variant / "more.py").write_text("")


def lose_a_file(variant):
    (variant / "dispatch.py").unlink()


def another_version(variant):
    edit(variant / "metadata.json", version=project.version() + 1)


def another_name(variant):
    edit(variant / "metadata.json", name="another")


def another_license(variant):
    edit(variant / "metadata.json", license="MIT")


def no_digest(variant):
    metadata = json.loads((variant / "metadata.json").read_text())
    del metadata["digest"]
    (variant / "metadata.json").write_text(json.dumps(metadata))


def no_commit(variant):
    edit(variant / "metadata.json", provenance={"kernel-builder": {"version": "1"}})


def no_metadata(variant):
    (variant / "metadata.json").write_text("{}")


def no_archs(variant):
    edit(variant / "metadata.json", backend={"type": "cuda"})


def two_extensions(variant):
    (variant / "another.abi3.so").write_bytes(next(variant.glob("*.so")).read_bytes())


def symbols(code: str):
    def link(variant):
        """In place of the extension, a library that uses what it may not."""
        command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-x", "c++", "-", "-o", next(variant.glob("*.so"))]
        subprocess.run(command, input=code, text=True, check=True)

    return link


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (change_a_file, "hash mismatch for layers.py"),
        (add_a_file, "more.py"),
        (lose_a_file, "dispatch.py"),
        (another_version, f"is {project.name()} version {project.version() + 1}, and build.toml says"),
        (another_name, "is another version"),
        (another_license, "has the licence MIT"),
        (no_digest, "has no digest"),
        (no_commit, "says not which commit it was built from"),
        (no_metadata, "missing field"),
        (no_archs, "is for CUDA and names no architectures"),
        (two_extensions, "has 2 extensions, not one"),
        (symbols('extern "C" void _PyObject_Dump(void*); void f() { _PyObject_Dump(0); }'), "outside Python 3.9 ABI"),
        (symbols("namespace c10 { void f(); } void g() { c10::f(); }"), "outside torch stable ABI: c10::f()"),
    ],
)
def test_a_variant_with_a_fault(variant, plant, fault):
    plant(variant)
    faults = variants.faults(variant)
    assert any(fault in found for found in faults), faults


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


def test_two_builds_of_one_commit_are_the_same(released, tmp_path, monkeypatch):
    monkeypatch.setattr(project, "ROOT", released)
    again = checkout.build(rebuild.clone(tmp_path / "in" / "another" / "folder"))
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

    edit(again / variant.name / "metadata.json", version=7)
    error, printed = checked()
    assert error == "error: not to be released"
    assert "is the same 1 found" in printed and f"{variant.name}/metadata.json differs between two builds" in printed

    add_a_file(variant)
    error, printed = checked()
    assert error == "error: not to be released"
    assert f"{variant.name} 1 found" in printed and "second build" not in printed  # which takes long

    error, _ = checked(tmp_path / "absent")
    assert error.startswith("error: no variants in")


def test_the_gate_before_the_upload(build, variant):
    output = StringIO()
    console = Console(file=output, width=100)
    assert check.gate(build, {variant.name}, console) is None
    assert check.gate(build, {"torch-stable-abi211-cu130-aarch64-linux"}, console) == "error: not to be released"
    assert "torch-stable-abi211-cu130-aarch64-linux is published on v" in output.getvalue()
    add_a_file(variant)
    assert check.gate(build, set(), console) == "error: not to be released"
    assert check.gate(build / "absent", set(), console).startswith("error: no variants in")


def test_a_tag_names_the_version():
    version = project.version()
    assert release.check_tag(f"v{version}.0") is None and release.check_tag(f"v{version}.12") is None
    for tag in (f"v{version}", f"v{version + 1}.0", f"v{version}.0.1", f"{version}.0"):
        assert release.check_tag(tag).startswith(f"error: the tag is {tag}, and build.toml says version {version}")


# A signature itself takes the network, and the identity of a workflow.


def test_what_is_not_signed(build, variant):
    def found() -> list[str]:
        workflow = "org/repository/.github/workflows/release.yaml@refs/tags/v1.0"
        return signature.faults(build, "org/repository", workflow)

    assert found() == [f"{variant.name}: VerificationResult.SignatureBundleMissing()"]
    (variant / "metadata.json.sigstore").write_text("{}")
    (fault,) = found()
    assert fault.startswith(f"{variant.name}: VerificationResult.SignatureBundleInvalid(")
    assert not any("sigstore" in fault for fault in variants.faults(variant))  # the digest is not of the signature


# Publishing


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "hub", token="secret") as hub:
        yield hub


def published(released: Path, hub: Hub, build: Path) -> subprocess.CompletedProcess:
    address = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = ["tools/release.py", "publish", "--build", str(build)]
    return checkout.run(released, *command, env={**os.environ, **address})


def test_what_is_published(released, hub, build, variant):
    shutil.copytree(variant, build / "torch-stable-abi211-cu130-x86_64-linux")
    assert published(released, hub, build).returncode == 0
    (variant / "dispatch.py").rename(variant / "choice.py")  # as a later build may have it
    done = published(released, hub, build)
    repository = hub.repository(project.repo_id())
    head = repository.branches()[publish.branch()]
    assert done.returncode == 0 and done.stdout.strip() == head
    files = {
        f"build/{folder.name}/{place}": path
        for folder in variants.variants(build)
        for place, path in variants.files(folder)
    }
    entries = {entry.path: entry for entry in repository.tree(head, recursive=True) if entry.type == "file"}
    assert {path for path in entries if path.startswith("build/")} == set(files)
    assert all(repository.read(entries[place]) == path.read_bytes() for place, path in files.items())
    benchmarks = {f"benchmarks/{path.name}" for path in (project.ROOT / "benchmarks").glob("benchmark*.py")}
    assert set(entries) == set(files) | benchmarks
    (card,) = [repository.read(entry) for entry in repository.tree(repository.branches()["main"])]
    assert card.decode() == publish.render_card()

    # A variant that users of the version have is not left behind.
    shutil.rmtree(build / "torch-stable-abi211-cu130-x86_64-linux")
    done = published(released, hub, build)
    assert done.returncode == 1
    assert "error: torch-stable-abi211-cu130-x86_64-linux is published on v" in done.stderr
    assert "raise the version in build.toml" in done.stderr
    assert repository.branches()[publish.branch()] == head


def test_publishing_needs_a_token_and_a_hub_on_loopback(released, hub, build):
    hub.token = "another"
    assert "403" in published(released, Stranger(hub.url), build).stderr
    assert not hub.exists(project.repo_id())
    done = published(released, Stranger("http://hub.invalid"), build)
    assert done.returncode == 1 and "http://hub.invalid is not on loopback" in done.stderr


class Stranger:
    """What one knows of a Hub without its token."""

    def __init__(self, url: str):
        self.url, self.token = url, "guessed"


# The rehearsal: what its steps do is tested above and in test_hub.py.


def test_the_rehearsal_has_a_hub_of_its_own(tmp_path):
    with dry_run._hub(project.ROOT, tmp_path) as address:
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
    assert "what is not committed is not in the release" in done.stdout and "2 of 5: build" in done.stdout
    assert "no compiler" in done.stderr and "error: the rehearsal failed at step 2: build" in done.stderr
    assert "3 of 5" not in done.stdout
