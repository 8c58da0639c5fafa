"""The workflows: what they run is there, and what they use is pinned."""

import os
import re
import subprocess
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from huggingface_hub import JobHardware, JobStage

import gpu_job
import project

WORKFLOWS = sorted((project.ROOT / ".github/workflows").glob("*.yaml"))
SCRIPTS = [path for path in (project.ROOT / ".ci").iterdir() if path.is_file()]


def unpinned(text: str) -> list[str]:
    """The actions that are not named by a commit with its version beside."""
    used = re.findall(r"^\s*(?:- )?uses: *(.+)$", text, re.MULTILINE)
    local = r"\./\.github/workflows/\S+\.yaml( # .+)?"
    return [use for use in used if not re.fullmatch(rf"[\w./-]+@[0-9a-f]{{40}} # v[\d.]+|{local}", use)]


def unknown_targets(text: str) -> set[str]:
    """What is given to make and is no target of the Makefile."""
    makefile = (project.ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    lines = re.findall(r"^\s*(?:- run: )?make ([a-z -]+)$", text, re.MULTILINE)
    return {name for line in lines for name in line.split()} - targets


def missing_scripts(text: str) -> set[str]:
    """The scripts of this tree that are called and are not there."""
    return {
        name
        for name in re.findall(r"\b(?:tools|tests)/[\w/]+\.py|\.ci/\w+", text)
        if not Path(project.ROOT / name).exists()
    }


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow(workflow):
    text = workflow.read_text()
    assert unpinned(text) == []
    loaded = yaml.safe_load(text)
    assert loaded["permissions"] == {"contents": "read"}  # a job that needs more asks for it
    assert "group" in loaded["concurrency"]
    for job in loaded["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job
        called = job.get("uses", "")
        assert not called or (project.ROOT / called).is_file()


@pytest.mark.parametrize("script", [*WORKFLOWS, *SCRIPTS], ids=lambda path: path.name)
def test_what_is_called_exists(script):
    text = script.read_text()
    assert unknown_targets(text) == set()
    assert missing_scripts(text) == set()


def test_faults_are_found():
    assert unpinned("      - uses: actions/checkout@v7\n") == ["actions/checkout@v7"]
    assert unpinned(f"        uses: actions/checkout@{'a' * 40}\n") == [f"actions/checkout@{'a' * 40}"]
    assert unpinned(f"      - uses: actions/checkout@{'a' * 39} # v7.0.1\n") != []
    assert unknown_targets("make lint\n      - run: make test tset\n") == {"tset"}
    assert missing_scripts("run: python tools/gpu_jobs.py --out x\nrun: .ci/rum\n") == {"tools/gpu_jobs.py", ".ci/rum"}


def test_the_releases_api_and_variants_are_guarded():
    """What users load was checked, signed, and run on GPUs as it was uploaded; and no secret may write to the Hub."""
    text = (project.ROOT / ".github/workflows/release.yaml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    order = ["check", "build", "stage", "gpu", "promote", "smoke"]
    assert list(jobs) == order
    for earlier, later in pairwise(order):
        assert earlier in jobs[later]["needs"]
    runs = {name: [step.get("run", "") for step in job.get("steps", [])] for name, job in jobs.items()}
    assert "make release-check" in runs["check"]
    gate, sign, stage = (find(runs["stage"], what) for what in ("release-gate", "release-sign", "release.py stage"))
    assert gate < sign < stage
    assert jobs["gpu"]["with"] == {"staged": "${{ needs.stage.outputs.commit }}"}
    assert find(runs["promote"], "release.py promote") == len(runs["promote"]) - 1
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {
        "build",
        "stage",
        "promote",
    }
    assert set(re.findall(r"secrets\.(\w+)", text)) == {"HF_JOBS_TOKEN"}


def test_the_first_real_compilation_is_not_the_release():
    """What a compiler reads is built by Nix, with the oldest toolkit as with the newest, when it comes to main."""
    on = yaml.safe_load((project.ROOT / ".github/workflows/build.yaml").read_text())[True]  # YAML 1.1 reads `on` so
    assert on["push"]["branches"] == ["main"]
    config = project.config()
    listed = [source for table in (config["torch"], *config["kernel"].values()) for source in table["src"]]
    for source in ["build.toml", "flake.nix", "flake.lock", *listed]:
        assert any(fnmatch(source, pattern) for pattern in on["push"]["paths"]), source


def test_the_variants_without_compiled_ops_are_built():
    """By kernel-builder as flake.lock has it, for this commit; and they come to the others."""
    job = yaml.safe_load((project.ROOT / ".github/workflows/build.yaml").read_text())["jobs"]["noarch"]
    runs = [step.get("run", "") for step in job["steps"]]
    source, described, built, hashed = (
        find(runs, what) for what in ("noarch.py", "create-pyproject", "setup.py", "hash")
    )
    assert source < described < built < hashed
    for step in (described, hashed):
        assert runs[step].startswith("nix run --inputs-from . kernel-builder#kernel-builder -- ")
    assert '--kernel-sha "$GITHUB_SHA"' in runs[described]
    artifact = job["steps"][-1]["with"]["name"]
    release = yaml.safe_load((project.ROOT / ".github/workflows/release.yaml").read_text())["jobs"]["stage"]["steps"]
    (pattern,) = [step["with"]["pattern"] for step in release if "pattern" in step.get("with", {})]
    assert fnmatch(artifact, pattern)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_runners_have_torch_for_cpus(workflow):
    """Else `kernels` looks for a variant for CUDA there. `make compat` brings its own, `make lint` has none."""
    loaded = yaml.safe_load(workflow.read_text())
    for name, job in loaded["jobs"].items():
        runs = [step.get("run", "") for step in job.get("steps", [])]
        made = {target for run in runs for target in re.findall(r"^make ([a-z-]+)", run)}
        if made - {"lint", "compat"}:
            environment = loaded.get("env", {}) | job.get("env", {})
            assert environment.get("UV_TORCH_BACKEND") == "cpu", name
            assert environment.get("INSTALLER") == "uv pip install --python .venv/bin/python", name
            assert [run for run in runs if re.fullmatch(r"pip install uv==[\d.]+", run)], name


def test_the_variant_for_aarch64_runs_somewhere():
    job = yaml.safe_load((project.ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]["test"]
    runners = {row["runner"] for row in job["strategy"]["matrix"]["include"]}
    assert "ubuntu-24.04-arm" in runners and job["runs-on"] == "${{ matrix.runner }}"


def test_every_variant_is_built_on_a_machine_of_its_kind():
    """All systems that the flake has variants for. Those for CPUs are tested there, before anybody vouches for them."""
    job = yaml.safe_load((project.ROOT / ".github/workflows/build.yaml").read_text())["jobs"]
    (listed,) = [step["run"] for step in job["variants"]["steps"] if "nix eval" in step.get("run", "")]
    assert "builtins.attrValues all" in listed
    pattern = r"endsWith\(matrix\.variant, '([\w-]+)'\) && '([\w.-]+)'"
    runners = dict(re.findall(pattern, job["build"]["runs-on"]))
    assert runners == {"aarch64-darwin": "macos-26", "aarch64-linux": "ubuntu-24.04-arm"}
    assert job["build"]["runs-on"].endswith("|| 'ubuntu-24.04' }}")
    runs = [step.get("run", "") for step in job["build"]["steps"]]
    built, tested = find(runs, "nix build"), find(runs, "test_kernels_ci.py")
    (attested,) = [place for place, step in enumerate(job["build"]["steps"]) if "attest" in step.get("uses", "")]
    assert built < tested < attested
    assert job["build"]["steps"][tested]["if"] == "contains(matrix.variant, '-cpu-')"
    assert "python -B " in runs[tested]  # no bytecode in what is uploaded


def test_the_installer_of_the_runners_installs_everything():
    command = ["make", "--dry-run", "--always-make", "venv", "test", "coverage"]
    environment = {**os.environ, "INSTALLER": "the installer"}
    shown = subprocess.run(
        command, cwd=project.ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert " pip install" not in shown
    installed = set(re.findall(r"^the installer .*-r requirements/(\w+)\.txt$", shown, re.MULTILINE))
    assert {"build", "test", "bench", "lint", "timm", "coverage"} <= installed


def test_what_is_attested():
    """Every variant, with the action that the older ones for provenance alone have become."""
    jobs = yaml.safe_load((project.ROOT / ".github/workflows/build.yaml").read_text())["jobs"]
    for name in ("build", "noarch"):
        (step,) = [step for step in jobs[name]["steps"] if "attest" in step.get("uses", "")]
        assert step["uses"].startswith("actions/attest@")
        assert "build/*/metadata.json" in step["with"]["subject-path"]  # which has the digests of all other files


def find(commands: list[str], what: str) -> int:
    (place,) = [number for number, command in enumerate(commands) if what in command]
    return place


# The job on a GPU: with a Hub that answers as the real one does.


def test_the_gpus_are_for_hire():
    matrix = yaml.safe_load((project.ROOT / ".github/workflows/gpu.yaml").read_text())["jobs"]["gpu"]["strategy"][
        "matrix"
    ]
    rows = matrix["include"]
    assert {row["generation"] for row in rows} == {"Ampere", "Ada", "Hopper", "Blackwell"}
    assert {row["flavor"] for row in rows} <= {hardware.value for hardware in JobHardware}


class FakeHub:
    def __init__(self, lines: list[str], stage: JobStage, dies: type[BaseException] | None = None):
        self.lines, self.stage, self.dies = lines, stage, dies
        self.started, self.cancelled = None, False

    def run_job(self, **job):
        self.started = job
        return SimpleNamespace(id="1", url="https://hub.invalid/jobs/1")

    def fetch_job_logs(self, *, job_id, follow, namespace):
        yield from self.lines
        if self.dies:
            raise self.dies

    def wait_for_job(self, job_id, *, namespace):
        return SimpleNamespace(status=SimpleNamespace(stage=self.stage))

    def cancel_job(self, *, job_id, namespace):
        self.cancelled = True


LINES = [f"line {number}\n" for number in range(100)]
FIGURES = (project.ROOT / "benchmarks/results/h100-mlp.json").read_text()
REPOSITORY = {"repository": "https://host.invalid/org/kernel", "commit": "0" * 40, "staged": ""}
CALL = {"flavor": "l4x1", "timeout": "1m"} | REPOSITORY


def test_a_job_that_succeeds(tmp_path):
    hub = FakeHub([*LINES, gpu_job.FIGURES + "\n", *FIGURES.splitlines(keepends=True)], JobStage.COMPLETED)
    assert gpu_job.run(hub, **CALL, out=tmp_path) is None
    assert (tmp_path / "log.txt").read_text() == "".join(LINES)
    assert (tmp_path / "figures.json").read_text() == FIGURES
    summary = (tmp_path / "summary.md").read_text().splitlines()
    assert summary[0] == "## l4x1" and "line 99" in summary and "line 0" not in summary
    assert hub.started["flavor"] == "l4x1" and hub.started["namespace"] == project.repo_id().split("/")[0]
    assert hub.started["env"]["COMMIT"] == CALL["commit"] and "HF_TOKEN" not in str(hub.started)
    assert not hub.cancelled


def test_a_job_that_fails(tmp_path):
    hub = FakeHub(LINES, JobStage.ERROR)
    assert gpu_job.run(hub, **CALL, out=tmp_path).startswith("error: the job on l4x1 ended as ERROR: https://")
    assert (tmp_path / "log.txt").exists() and not (tmp_path / "figures.json").exists()


def test_a_job_that_nobody_waits_for_is_cancelled(tmp_path):
    hub = FakeHub(LINES, JobStage.COMPLETED, dies=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        gpu_job.run(hub, **CALL, out=tmp_path)
    assert hub.cancelled and (tmp_path / "log.txt").exists()


def test_what_a_gpu_is_asked():
    """To test what was staged, where something was, and to fail where a point is above 1.02 of eager."""
    script = (project.ROOT / ".ci/gpu").read_text()
    staged = script[script.index('if [ -n "${STAGED:-}" ]') : script.index("\nelse\n")]
    assert 'tools/release.py try "$STAGED"' in staged
    measured = re.findall(r"^ *\.venv/bin/python benchmarks/peers\.py (?:.*\\\n)*.*$", script, re.MULTILINE)
    assert len(measured) == 2
    assert all("--limit 1.02" in command and command.endswith("|| failed=1") for command in measured)
    assert script.endswith('\nexit "$failed"\n')


def test_the_script_prints_what_the_job_reads():
    assert f"echo '{gpu_job.FIGURES}'\n" in (project.ROOT / ".ci/gpu").read_text()
    assert "exec .ci/gpu\n" in gpu_job.SCRIPT
