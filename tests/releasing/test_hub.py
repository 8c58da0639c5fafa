"""The package as users get it: published to a Hub on loopback, fetched from there by the real clients.

Every user is a process with an empty cache, who knows the Hub's address and nothing else. What the clients do not check
is tested too: the card tells users so, and how to check it themselves.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kernels import Metadata
from kernels._rust import Digest, DigestValidationError
from kernels.variants import get_variants_local, resolve_variant
from kernels.verify import DEFAULT_POLICIES

import checkout
import forks
import machine
import noarch
import project
from builder import abi
from builder.plan import base
from hub import Hub
from releasing import dry_run, publish, signature
from releasing.rules import variants

REPO, VERSION = project.repo_id(), project.version()
ORGANISATION = REPO.split("/")[0]
ABI = f"torch-stable-abi{project.config()['torch']['stable-abi']['cpu'].replace('.', '')}"
MACHINE = platform.machine()
CPU = f"{ABI}-cpu-{MACHINE}-linux"
# Variants for others: what they hold must never be fetched.
OTHERS = {
    f"{ABI}-cpu-riscv64-linux": "CPU (riscv64) does not match system CPU",
    f"{ABI}-rocm71-{MACHINE}-linux": "backend (rocm71) does not match selected backend",
    f"torch25-cxx11-cpu-{MACHINE}-linux": "Torch version (2.5) does not match",
    f"torch-stable-abi999-cpu-{MACHINE}-linux": "Torch stable ABI version (9.99) is too new",
}
OLDER = f"torch-stable-abi29-cpu-{MACHINE}-linux"  # would run too, and is not preferred


@dataclass
class Published:
    """A Hub, and what was published to it."""

    hub: Hub
    build: Path

    @property
    def ours(self) -> Path:
        """The variant for the torch of this machine."""
        if torch.version.cuda is None:
            return self.build / CPU
        return self.build / resolve_variant(get_variants_local(self.build))[0].variant_str

    @property
    def commit(self) -> str:
        return self.hub.repository(REPO).branches()[f"v{VERSION}"]

    def change(self, files: dict[str, bytes]) -> None:
        """A later commit on the version's branch."""
        added = {f"build/{self.ours.name}/{name}": content for name, content in files.items()}
        self.hub.repository(REPO).commit(f"v{VERSION}", "A later commit", added, removed=[])


class Users:
    """Starts processes that know the Hub, and nothing of this tree; those of one home share a cache."""

    def __init__(self, hub: Hub, folder: Path):
        self.hub = hub
        self.folder = folder

    def environment(self, home: str, more: dict[str, str]) -> dict[str, str]:
        kept = {
            name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "OMP_NUM_THREADS") if name in os.environ
        }
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        known = {
            "PATH": path,
            "HOME": str(self.folder),
            "HF_HOME": str(self.folder / home),
            "HF_ENDPOINT": self.hub.url,
        }
        return kept | known | more

    def run(self, name: str, *arguments, home: str = "home", **more: str) -> subprocess.CompletedProcess:
        """Runs a command that pip has installed, `kernels` or `hf`."""
        script = Path(sysconfig.get_path("scripts"), name)
        return forks.run(script, *arguments, cwd=self.folder, env=self.environment(home, more))

    def does(self, *command, **more: str) -> str:
        """The output of the command; it must succeed."""
        return self._printed(self.run(*command, **more))

    def python(self, program: str | Path, *arguments: str, home: str = "home", **more: str) -> str:
        """The output of the code or the script; it must succeed."""
        done = forks.run(program, *arguments, cwd=self.folder, env=self.environment(home, more))
        return self._printed(done)

    def fails(self, program: str | Path, *arguments: str) -> str:
        """The error with which the code or the script ends."""
        done = forks.run(program, *arguments, cwd=self.folder, env=self.environment("home", {}))
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stderr

    def _printed(self, done: subprocess.CompletedProcess) -> str:
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def fetched(self) -> list[str]:
        """The files whose content was asked for."""
        return [request.split("/build/")[1] for request in self.hub.requests if request.startswith("GET /kernels/")]


def publish_from(folder: Path, build: Path, hub: Hub) -> None:
    for command in (["stage", "--build", str(build)], ["promote", publish.STAGING]):
        environment = os.environ | checkout.publisher(hub.url, hub.identity)
        done = checkout.run(folder, "tools/release.py", *command, env=environment)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Iterator[Published]:
    """The version of this tree, with variants for others beside its own, and a later version."""
    folder = checkout.make(tmp_path_factory.mktemp("checkout"))
    build = shutil.copytree(checkout.build(folder), folder.parent / "build", ignore=shutil.ignore_patterns(".cache"))
    for variant in project.BUILD.glob(f"{ABI}-cu*"):
        shutil.copytree(variant, build / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    if not list(build.glob(f"{ABI}-cu*")):  # a torch built for CUDA takes no other variant, GPU or not
        shutil.copytree(
            build / CPU, build / f"{ABI}-cu{(torch.version.cuda or '13.0').replace('.', '')}-{MACHINE}-linux"
        )
    for name in [*OTHERS, OLDER]:
        (build / name).mkdir()
        shutil.copy(build / CPU / "metadata.json", build / name)
        (build / name / "__init__.py").write_text("raise AssertionError('a variant for others')\n")
    publisher = {"token": "secret", "identity": "a workflow"}
    with Hub(tmp_path_factory.mktemp("hub"), **publisher, trusted=[ORGANISATION]) as hub:
        hub.repository(REPO)
        publish_from(folder, build, hub)
        checkout.set_version(folder, VERSION + 1)
        publish_from(folder, checkout.build(folder), hub)
        yield Published(hub, build)


@pytest.fixture
def users(published, tmp_path) -> Users:
    published.hub.requests.clear()
    return Users(published.hub, tmp_path)


@pytest.fixture
def copy(published, tmp_path) -> Iterator[Published]:
    """A Hub of the test's own, to change."""
    with Hub(shutil.copytree(published.hub.folder, tmp_path / "hub"), "secret", trusted=[ORGANISATION]) as hub:
        yield Published(hub, published.build)


@pytest.fixture
def users_of_copy(copy, tmp_path) -> Users:
    return Users(copy.hub, tmp_path)


GET = f"from kernels import get_kernel; kernel = get_kernel({REPO!r}, version={VERSION})"


# Loading

SMOKE = (dry_run.SMOKE, REPO, str(VERSION))


def test_a_model_fused_with_what_the_hub_serves(published, users):
    loaded, *models = users.python(*SMOKE).splitlines()
    assert loaded == f"loaded {REPO} version {VERSION}, commit {published.commit}"
    assert [line.split(", ")[0] for line in models] == ["Llama: 2 MLPs fused", "Gemma: 2 MLPs fused"]


def test_a_kernel_that_computes_something_else_is_seen(copy, users_of_copy):
    fault = b"""
_fuse_mlps = fuse_mlps
def fuse_mlps(model):
    model.lm_head.weight.data[7] += 1
    return _fuse_mlps(model)
"""
    copy.change({"__init__.py": (copy.ours / "__init__.py").read_bytes() + fault})
    assert "Tensor-likes are not close" in users_of_copy.fails(*SMOKE)


def test_a_kernel_whose_compiled_ops_do_not_run_is_seen(copy, users_of_copy):
    """The results of PyTorch in their place are right, and differ in nothing."""
    fault = b'\n_forced = backend("torch")\n_forced.__enter__()\n'
    copy.change({"__init__.py": (copy.ours / "__init__.py").read_bytes() + fault})
    assert "of Llama's MLPs not all were fused" in users_of_copy.fails(*SMOKE)


def test_the_right_variant_is_downloaded_once_and_nothing_else(published, users):
    assert f"/{published.ours.name}/" in users.python(f"{GET}; print(kernel.__file__)")
    expected = [f"{published.ours.name}/{place}" for place, _ in variants.files(published.ours)]
    assert sorted(users.fetched()) == sorted(expected)
    users.python(GET)
    assert len(users.fetched()) == len(expected)


def test_an_error_says_of_every_variant_why_it_does_not_fit(published, users):
    repo = f"{ORGANISATION}/for-others"
    metadata = {
        f"build/{name}/metadata.json": (published.build / name / "metadata.json").read_bytes() for name in OTHERS
    }
    published.hub.repository(repo).commit("v1", "Others", metadata, removed=[])
    error = users.fails(f"from kernels import get_kernel; get_kernel({repo!r}, version=1, backend='cpu')")
    assert "FileNotFoundError: Cannot find a build variant for this system" in error
    assert all(f"{name}: {reason}" in error for name, reason in OTHERS.items()), error
    assert users.python(f"from kernels import has_kernel; print(has_kernel({repo!r}, version=1))") == "False"


def test_has_kernel_fetches_no_kernel(users):
    has_kernel = "from kernels import has_kernel; print(has_kernel({!r}, version={}))"
    assert users.python(has_kernel.format(REPO, VERSION)) == "True"
    assert [Path(place).name for place in users.fetched()] == ["metadata.json"]
    assert f"Version {VERSION + 8} not found" in users.fails(has_kernel.format(REPO, VERSION + 8))


def test_kernels_versions_and_info(published, users):
    printed = users.does("kernels", "versions", REPO)
    assert f"Version {VERSION}:" in printed and f"Version {VERSION + 1}:" in printed
    assert f"{published.ours.name} compatible, preferred" in printed
    assert all(f"{name}: " in printed for name in OTHERS)
    facts = json.loads(users.does("kernels", "info", REPO, "--version", str(VERSION), "--json"))
    assert (facts["name"], facts["version"], facts["revision"]) == (project.name(), VERSION, f"v{VERSION}")


def test_two_versions_in_one_process(users):
    printed = users.python(f"""
import torch
from kernels import get_kernel
kernels = [get_kernel({REPO!r}, version=version, backend="cpu") for version in ({VERSION}, {VERSION + 1})]
x = torch.randn(3, 8)
for kernel in kernels:
    torch.testing.assert_close(kernel.swiglu(x, x), torch.nn.functional.silu(x) * x)
    print(kernel.__name__, hasattr(getattr(torch.ops, kernel.__name__), "act_and_mul"))
""")
    (first, first_has_ops), (second, second_has_ops) = (line.split() for line in printed.splitlines())
    assert first != second and first_has_ops == second_has_ops == "True"


def test_a_layer_in_kernelize(users):
    device = machine.device_type()
    printed = users.python(f"""
import kernels, torch
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
kernels.replace_kernel_forward_from_hub(LlamaMLP, "GatedMLP")
torch.set_default_device({device!r})
mlp, x = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=88)), torch.randn(3, 32)
expected = mlp(x)
layer = kernels.LayerRepository({REPO!r}, layer_name="GatedMLP", version={VERSION})
with kernels.use_kernel_mapping({{"GatedMLP": {{{device!r}: layer}}}}, inherit_mapping=False):
    mlp = kernels.kernelize(mlp, mode=kernels.Mode.INFERENCE, device={device!r})
torch.testing.assert_close(mlp(x), expected)
print(mlp.forward.__func__.__module__)
""")
    assert re.fullmatch(rf"_{project.python_name()}_\w+\.layers", printed)


def test_a_download_that_breaks_off_is_taken_up_again(copy, users_of_copy):
    """A download is kept by chunks of 10 MiB: a file that is smaller is fetched from its start."""
    big, chunk = os.urandom(11 << 20), 10 << 20
    copy.change({"big.bin": big})
    (extension,) = copy.ours.glob("*.so")
    cuts = {"big.bin": chunk + 5, extension.name: extension.stat().st_size // 2}
    copy.hub.cuts.update({f"build/{copy.ours.name}/{name}": size for name, size in cuts.items()})
    place = Path(users_of_copy.python(f"{GET}; print(kernel.__file__)")).parent
    assert not copy.hub.cuts  # they did break off
    asked = [request.removeprefix(f"{copy.ours.name}/") for request in users_of_copy.fetched()]
    assert [request for request in asked if request.startswith("big.bin")] == ["big.bin", f"big.bin bytes={chunk}-"]
    assert asked.count(extension.name) == 2
    assert (place / "big.bin").read_bytes() == big
    assert (place / extension.name).read_bytes() == extension.read_bytes()


# Trust


def test_a_publisher_without_trust(copy, users_of_copy):
    users = users_of_copy
    users.hub.trusted.clear()
    printed = users.python(f"""
from kernels import get_kernel
for trusted in (False, ["someone/else"], [{REPO!r}], True):
    try:
        get_kernel({REPO!r}, version={VERSION}, trust_remote_code=trusted)
        print("loaded")
    except ValueError as error:
        print(error)
""")
    *refused, listed, every = printed.splitlines()
    assert len(refused) == 2 and (listed, every) == ("loaded", "loaded")
    assert all("is not from a trusted publisher. Set trust_remote_code=True" in error for error in refused)
    # A lock has no such argument, and `kernels download` does not ask.
    folder = project_folder(users)
    assert "is not from a trusted publisher" in users.run("kernels", "lock", folder).stderr
    (folder / "kernels.lock").write_text(LOCK.format(repo=REPO, version=VERSION, commit=copy.commit))
    users.does("kernels", "download", folder, home="another")


def test_nothing_of_an_untrusted_repository_is_fetched(copy, users_of_copy):
    copy.hub.trusted.clear()
    assert "is not from a trusted publisher" in users_of_copy.fails(GET)
    assert not [request for request in copy.hub.requests if REPO in request]


# Pins, locks, offline

LOCK = '[{{"dependency": {{"repo-id": "{repo}", "version": {version}}}, "lock": {{"commit": "{commit}"}}}}]'


def project_folder(users: Users) -> Path:
    folder = users.folder / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = {VERSION}\n')
    return folder


def test_a_commit_and_a_lock_hold_when_the_branch_moves(copy, users_of_copy):
    users, commit = users_of_copy, copy.commit
    folder = project_folder(users)
    users.does("kernels", "lock", folder)
    assert json.loads((folder / "kernels.lock").read_text())[0]["lock"] == {"commit": commit}
    copy.change({"__init__.py": b"raise AssertionError('the branch moved')\n"})
    assert "the branch moved" in users.fails(GET)
    printed = users.python(f"""
from pathlib import Path
from kernels import get_kernel, get_locked_kernel
print(get_kernel({REPO!r}, revision={commit!r}).__file__)
print(get_locked_kernel({REPO!r}, lockfile=Path("project/kernels.lock")).__file__)
""")
    assert all(f"/{commit}/" in place for place in printed.splitlines())


OFFLINE = f"""
from pathlib import Path
from kernels import get_kernel, load_kernel
for load in (
    lambda: get_kernel({REPO!r}, version={VERSION}),
    lambda: load_kernel({REPO!r}, lockfile=Path("project/kernels.lock")),
):
    try:
        print("loaded", load().__file__)
    except (ValueError, FileNotFoundError) as error:
        print(error)
"""


def test_offline(copy, users_of_copy):
    """The files that loading a kernel fetches are not enough to load it offline: `kernels` 0.17.2, `huggingface_hub`
    2.4.0 look for the branch, which was asked for by its commit, and for the whole of it. What is enough is all of the
    branch."""
    users, folder = users_of_copy, project_folder(users_of_copy)
    (folder / "kernels.lock").write_text(LOCK.format(repo=REPO, version=VERSION, commit=copy.commit))
    place = Path(users.python(f"{GET}; print(kernel.__file__)"))
    users.does("kernels", "download", folder, "--all-variants")
    version, locked = users.python(OFFLINE, HF_HUB_OFFLINE="1").splitlines()
    assert "is not available in the local cache" in version and "Cannot find a local snapshot" in locked

    users.does("hf", "download", REPO, "--repo-type", "kernel", "--revision", f"v{VERSION}", home="whole")
    users.hub.requests.clear()
    users.hub.trusted.clear()  # which is not asked for
    printed = users.python(OFFLINE, home="whole", HF_HUB_OFFLINE="1").splitlines()
    assert [line.split()[0] for line in printed] == ["loaded", "loaded"]
    assert all(f"/{copy.ours.name}/" in line for line in printed)
    users.python(GET, home="none", HF_HUB_OFFLINE="1", LOCAL_KERNELS=f"{REPO}={place.parent}")
    assert not users.hub.requests


# Tampering: the clients load what they get. The digests find it, for whoever compares them, as the card shows.


def violations(variant: Path) -> list[str]:
    metadata = Metadata.read_from_file(variant / "metadata.json")
    try:
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    except DigestValidationError as error:
        return [str(violation) for violation in error.violations]
    return []


CHANGE = b"print('changed')\n"


def test_a_file_changed_in_the_cache(users):
    variant = Path(users.python(f"{GET}; print(kernel.__file__)")).parent
    assert violations(variant) == []
    with (variant / "dispatch.py").open("ab") as file:
        file.write(CHANGE)
    assert users.python(GET) == "changed"  # loaded all the same
    (found,) = violations(variant)
    assert "hash mismatch for dispatch.py" in found
    checked = users.run("hf", "cache", "verify", REPO, "--repo-type", "kernel")
    assert checked.returncode == 1 and f"{variant.name}/dispatch.py: expected" in checked.stdout


def test_a_file_changed_on_the_hub(copy, users_of_copy):
    users = users_of_copy
    changed = {"dispatch.py": (copy.ours / "dispatch.py").read_bytes() + CHANGE, "more.py": b""}
    copy.change(changed)
    printed, place = users.python(f"{GET}; print(kernel.__file__)").splitlines()
    assert printed == "changed"
    mismatch, unknown = violations(Path(place).parent)
    assert "hash mismatch for dispatch.py" in mismatch and "more.py" in unknown
    users.does("hf", "cache", "verify", REPO, "--repo-type", "kernel")  # the cache is as the Hub has it

    # Who writes the digests anew is found out by whoever knows what metadata.json was.
    metadata = json.loads((copy.ours / "metadata.json").read_text())
    for name, content in changed.items():
        metadata["digest"]["files"][name] = base64.b64encode(hashlib.sha256(content).digest()).decode()
    copy.change({"metadata.json": json.dumps(metadata).encode()})
    variant = Path(
        users.python(f"from kernels import install_kernel; print(install_kernel({REPO!r}, version={VERSION}))")
    )
    assert violations(variant) == []
    pinned, served = (hashlib.sha256((at / "metadata.json").read_bytes()).digest() for at in (copy.ours, variant))
    assert served != pinned


def test_signatures_are_asked_for_by_one_command_alone(copy, users_of_copy):
    users = users_of_copy
    done = users.run("kernels", "verify-signature", REPO, str(VERSION))
    assert done.returncode == 1 and "signature not found" in done.stdout
    copy.change({"metadata.json.sigstore": b"{}"})
    users.python(GET)
    done = users.run("kernels", "verify-signature", REPO, str(VERSION))
    assert done.returncode == 1 and "invalid signature bundle" in done.stdout
    assert {policy.repo_id for policy in DEFAULT_POLICIES} == {"huggingface/kernels-community"}  # as the card says


# The card: what it shows is run as it stands


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", publish.render_card(), re.MULTILINE | re.DOTALL)


CARD_SETUP = """
import torch, transformers
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=88, num_hidden_layers=2)
model, x = transformers.LlamaForCausalLM(config), torch.randn(3, 32)
gate_weight, up_weight, down_weight = torch.randn(88, 32), torch.randn(88, 32), torch.randn(32, 88)
"""


def test_what_the_card_shows_runs(users):
    (users.folder / "pyproject.toml").write_text("\n".join(blocks("toml")))
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    shown = [" ".join(command.split()[:2]) for command in commands]
    assert shown == ["kernels versions", "kernels lock", "hf download", "hf cache"]
    for command in commands:
        users.does(*command.split())
    code = CARD_SETUP + "\n".join(blocks("python"))
    code += "\nprint(policy.repo_id, policy.signer_uris[3])"
    printed = users.python(code + "\nprint(fused_mlp.__name__, tuple(y.shape))")
    assert "2 of 2 MLPs run in one call each" in printed and "SignatureBundleMissing()" in printed
    policy = signature.policy(f"v{VERSION}.3")
    assert f"{policy.repo_id} {policy.signer_uris[0]}\n" in printed
    assert re.search(rf"^_{project.python_name()}_\w+ \(3, 32\)$", printed, re.MULTILINE)


def test_the_card_states_the_facts_of_build_toml():
    card, config = " ".join(publish.render_card().split()), project.config()
    archs = [arch for table in config["kernel"].values() for arch in table.get("cuda-capabilities", [])]
    *most, last = sorted({base(arch) for arch in archs}, key=float)
    assert f"compute capability {', '.join(most)} and {last}" in card
    own = {base(arch) for arch in archs if arch.endswith("a")}  # our GEMMs are compiled for one architecture each
    of_fused = " and ".join(sorted(own, key=float))
    stated = re.findall(r"\*\*NVIDIA GPUs of compute.*?\*\*", card)
    assert stated == [f"**NVIDIA GPUs of compute capability {of_fused}**"]
    with_ptx = [base(arch) for arch in config["kernel"]["cuda"]["cuda-capabilities"] if arch.endswith("+PTX")]
    assert f"PTX of {' and '.join(with_ptx)}" in card
    (torch_version,) = set(config["torch"]["stable-abi"].values())
    assert f"for PyTorch {torch_version} and every later version" in card
    oldest = importlib.metadata.metadata("kernels")["Requires-Python"].removeprefix(">=")
    assert f"Python {oldest} and later, not free-threaded" in card
    assert f"kernels benchmark {REPO}" in card  # the section is there where there is a benchmarks/benchmark.py
    assert f'pip install "kernels>={importlib.metadata.version("kernels")}"' in card  # what all of this was tested with
    assert "the one variant that fits your torch" in card
    assert "on Linux, x86-64 and aarch64, and one for CPUs on Macs" in card
    assert 'also where there is no GPU: pass `backend="cpu"` there' in card
    assert 'On a Mac pass `backend="cpu"`' in card and f"macOS {abi.MACOS.removesuffix('.0')} and later" in card
    assert "on aarch64 it has portable C++ alone" in card
    assert f"`{'`, `'.join(f'torch-{backend}' for backend in noarch.BACKENDS)}`" in card
    assert "never been run on such a GPU" in card  # AMD's and Intel's
