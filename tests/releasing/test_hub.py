"""The package as users get it: published to a Hub on loopback, and fetched from there by the real clients.

Every user is a process with an empty cache that knows only the Hub's address. Gaps in the clients' checks are tested
too: the card tells users about them, and how to check for themselves.
"""

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

import checkout
import forks
import machine
import project
from hub import Hub
from releasing import dry_run, publish, signature
from releasing.rules import variants

REPO, VERSION = project.repo_id(), project.version()
ORGANISATION = REPO.split("/")[0]
ABI = f"torch-stable-abi{project.config()['torch']['stable-abi']['cpu'].replace('.', '')}"
MACHINE = platform.machine()
CPU = f"{ABI}-cpu-{MACHINE}-linux"
# Variants for other systems; their content must never be fetched.
OTHERS = (
    f"{ABI}-cpu-riscv64-linux",
    f"{ABI}-rocm71-{MACHINE}-linux",
    f"torch25-cxx11-cpu-{MACHINE}-linux",
    f"torch-stable-abi999-cpu-{MACHINE}-linux",
    f"torch-stable-abi29-cpu-{MACHINE}-linux",  # would run too, but is not preferred
)


@dataclass
class Published:
    """A Hub, its build, and accessors for what was published."""

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
        """Adds a commit to the version's branch."""
        added = {f"build/{self.ours.name}/{name}": content for name, content in files.items()}
        self.hub.repository(REPO).commit(f"v{VERSION}", "A later commit", added, removed=[])


class Users:
    """Starts processes that know the Hub and nothing of this tree; those with the same home share a cache."""

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
        """Runs a command installed by pip, `kernels` or `hf`."""
        script = Path(sysconfig.get_path("scripts"), name)
        return forks.run(script, *arguments, cwd=self.folder, env=self.environment(home, more))

    def does(self, *command, **more: str) -> str:
        """Returns the output of a command that must succeed."""
        return self._printed(self.run(*command, **more))

    def python(self, program: str | Path, *arguments: str, home: str = "home", **more: str) -> str:
        """Returns the output of code or a script that must succeed."""
        done = forks.run(program, *arguments, cwd=self.folder, env=self.environment(home, more))
        return self._printed(done)

    def fails(self, program: str | Path, *arguments: str) -> str:
        """Returns the error output of code or a script that must fail."""
        done = forks.run(program, *arguments, cwd=self.folder, env=self.environment("home", {}))
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stderr

    def _printed(self, done: subprocess.CompletedProcess) -> str:
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def fetched(self) -> list[str]:
        """The files whose content was requested."""
        return [request.split("/build/")[1] for request in self.hub.requests if request.startswith("GET /kernels/")]


def publish_from(folder: Path, build: Path, hub: Hub) -> None:
    for command in (["stage", "--build", str(build)], ["promote", publish.STAGING]):
        environment = os.environ | checkout.publisher(hub.url, hub.identity)
        done = checkout.run(folder, "tools/release.py", *command, env=environment)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Iterator[Published]:
    """Publishes this tree's version, with variants for other systems, and then a later version."""
    folder = checkout.make(tmp_path_factory.mktemp("checkout"))
    build = shutil.copytree(checkout.build(folder), folder.parent / "build", ignore=shutil.ignore_patterns(".cache"))
    for variant in project.BUILD.glob(f"{ABI}-cu*"):
        shutil.copytree(variant, build / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
    if not list(build.glob(f"{ABI}-cu*")):  # a torch built for CUDA accepts no other variant, with or without a GPU
        shutil.copytree(
            build / CPU, build / f"{ABI}-cu{(torch.version.cuda or '13.0').replace('.', '')}-{MACHINE}-linux"
        )
    for name in OTHERS:
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
    """A Hub that the test may change."""
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
    """PyTorch's results are right, but the smoke test sees that the compiled ops do not run."""
    fault = b'\n_forced = backend("torch")\n_forced.__enter__()\n'
    copy.change({"__init__.py": (copy.ours / "__init__.py").read_bytes() + fault})
    assert "of Llama's MLPs not all were fused" in users_of_copy.fails(*SMOKE)


def test_the_right_variant_is_downloaded_once_and_nothing_else(published, users):
    assert f"/{published.ours.name}/" in users.python(f"{GET}; print(kernel.__file__)")
    expected = [f"{published.ours.name}/{place}" for place, _ in variants.files(published.ours)]
    assert sorted(users.fetched()) == sorted(expected)
    users.python(GET)
    assert len(users.fetched()) == len(expected)


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


# Tampering: the clients load whatever they get. Comparing digests, as the card shows, reveals it.


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
    assert users.python(GET) == "changed"  # loaded nevertheless
    (found,) = violations(variant)
    assert "hash mismatch for dispatch.py" in found
    checked = users.run("hf", "cache", "verify", REPO, "--repo-type", "kernel")
    assert checked.returncode == 1 and f"{variant.name}/dispatch.py: expected" in checked.stdout


# The card: its code and commands run as shown


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
