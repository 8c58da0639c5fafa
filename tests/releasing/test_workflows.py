"""The workflows: all that they run exists, and all that they use is pinned."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
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
    """The actions that are not pinned to a commit with its version in a comment."""
    used = re.findall(r"^\s*(?:- )?uses: *(.+)$", text, re.MULTILINE)
    local = r"\./\.github/workflows/\S+\.yaml( # .+)?"
    return [use for use in used if not re.fullmatch(rf"[\w./-]+@[0-9a-f]{{40}} # v[\d.]+|{local}", use)]


def unknown_targets(text: str) -> set[str]:
    """The words passed to make that are not targets of the Makefile."""
    makefile = (project.ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    lines = re.findall(r"^\s*(?:- run: )?make ([a-z -]+)$", text, re.MULTILINE)
    return {name for line in lines for name in line.split()} - targets


def swallowed(commands: str) -> list[str]:
    """The lines that lose the failure of a substituted command: only an assignment fails with it."""
    return [line for line in commands.splitlines() if "$(" in line and not re.match(r"\s*\w+=\$\(", line)]


def missing_scripts(text: str) -> set[str]:
    """The scripts of this tree that are called but do not exist."""
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
    assert loaded["permissions"] == {"contents": "read"}  # jobs that need more request it
    assert "group" in loaded["concurrency"]
    for job in loaded["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job
        called = job.get("uses", "")
        assert not called or (project.ROOT / called).is_file()
        assert [line for run in runs(job) for line in swallowed(run)] == []


@pytest.mark.parametrize("script", [*WORKFLOWS, *SCRIPTS], ids=lambda path: path.name)
def test_what_is_called_exists(script):
    text = script.read_text()
    assert unknown_targets(text) == set()
    assert missing_scripts(text) == set()


def jobs_of(workflow: str) -> dict[str, dict]:
    return yaml.safe_load((project.ROOT / f".github/workflows/{workflow}.yaml").read_text())["jobs"]


def runs(job: dict) -> list[str]:
    return [step.get("run", "") for step in job.get("steps", [])]


def before(jobs: dict[str, dict], name: str) -> set[str]:
    """All jobs that must succeed before this one starts."""
    needs = jobs[name].get("needs", [])
    direct = {needs} if isinstance(needs, str) else {*needs}
    return direct.union(*(before(jobs, need) for need in direct))


def test_what_comes_before_what():
    """Files are checked, tested, signed, and run on GPUs as uploaded before users load them."""
    release, build = jobs_of("release"), jobs_of("build")
    assert before(release, "promote") == {"check", "build", "gate", "stage", "gpu"}
    assert before(release, "stage") == {"check", "build", "gate"}
    assert before(build, "attest") == {"variants", "build", "noarch", "test"}


def test_who_may_write():
    """No secret may write to the Hub. Jobs with an identity install only files with pinned hashes."""
    texts = {workflow.stem: workflow.read_text() for workflow in WORKFLOWS}
    assert set(re.findall(r"secrets\.(\w+)", "".join(texts.values()))) == {"HF_JOBS_TOKEN"}
    for workflow in texts:
        for name, job in jobs_of(workflow).items():
            trusted = "id-token" in job.get("permissions", {}) or "secrets." in str(job)
            for run in runs(job) if trusted else []:
                assert not re.search(r"\bmake\b|\buv\b|pytest", run), name
                assert "pip install" not in run or "--require-hashes" in run, name
            if "id-token" in job.get("permissions", {}) and workflow == "release" and "uses" not in job:
                assert job["environment"] in ("staging", "hub"), name


def test_the_release_installs_what_the_tests_run_with():
    folder = project.ROOT / "requirements"
    pinned = {line.lower().replace("_", "-") for line in (folder / "constraints.txt").read_text().splitlines()}
    for line in (folder / "release.txt").read_text().splitlines():
        package, digest = line.split(" --hash=sha256:")
        assert package.lower().replace("_", "-") in pinned and re.fullmatch("[0-9a-f]{64}", digest), line


def stub(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{code}\n")
    path.chmod(0o755)
    return path


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs the command as a runner does, with the programs in the folder's bin first."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )


def test_a_stage_that_fails(tmp_path):
    (command,) = [run for run in runs(jobs_of("release")["stage"]) if "GITHUB_OUTPUT" in run]
    out = tmp_path / "output"
    stub(tmp_path / "bin/python", "exit 1")
    assert shell(command, tmp_path, GITHUB_OUTPUT=str(out)).returncode == 1 and not out.exists()
    stub(tmp_path / "bin/python", f"echo {'a' * 40}")
    assert shell(command, tmp_path, GITHUB_OUTPUT=str(out)).returncode == 0
    assert out.read_text() == f"commit={'a' * 40}\n"


@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq, which runners have")
def test_every_variant_is_built_on_a_machine_of_its_kind(tmp_path):
    (command,) = [run for run in runs(jobs_of("build")["variants"]) if "GITHUB_OUTPUT" in run]
    names = ["a-cpu-aarch64-darwin", "a-cpu-aarch64-linux", "a-cu130-aarch64-linux", "a-cpu-x86_64-linux"]
    stub(tmp_path / "bin/nix", f"echo '{json.dumps(names)}'")
    out = tmp_path / "output"
    done = shell(command, tmp_path, GITHUB_OUTPUT=str(out))
    assert done.returncode == 0, done.stderr
    found = {name: json.loads(value) for name, value in (line.split("=") for line in out.read_text().splitlines())}
    runners = ["macos-26", "ubuntu-24.04-arm", "ubuntu-24.04-arm", "ubuntu-24.04"]
    assert found["variants"] == [dict(variant=name, runner=runner) for name, runner in zip(names, runners, strict=True)]
    assert found["cpu"] == [row for row in found["variants"] if "-cpu-" in row["variant"]]
    stub(tmp_path / "bin/nix", "exit 1")
    assert shell(command, tmp_path, GITHUB_OUTPUT=str(out)).returncode != 0


def test_the_folder_of_the_triton_kernels_is_not_taken_for_triton(tmp_path):
    """If Triton is not installed and pytest runs at the root, the folder `triton` must not be imported."""
    stub(tmp_path / "bin/python", f'exec {sys.executable} "$@"')
    (tmp_path / "pytest.py").write_text("import os, sys; print([os.path.abspath(path) for path in sys.path])")
    script = str(project.ROOT / ".ci/variant")
    done = shell(script, tmp_path, INSTALLER="true", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and repr(str(project.ROOT)) not in done.stdout


# The job on a GPU, with a Hub that answers as the real one does.


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
FIGURES = (project.ROOT / "benchmarks/results/mlps/h100-mlp.json").read_text()
REPOSITORY = {"repository": "https://host.invalid/org/kernel", "commit": "0" * 40, "staged": "tree"}
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


def test_what_was_not_staged_is_not_tested():
    assert [gpu_job.staged(text) for text in ("tree", "a" * 40)] == ["tree", "a" * 40]
    for text in ("", "main", "a" * 39):
        with pytest.raises(argparse.ArgumentTypeError, match="was anything staged"):
            gpu_job.staged(text)


@pytest.fixture
def gpu(tmp_path):
    """Runs .ci/gpu with stubs that record their calls and fail if these match `failing`."""

    def run(failing: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        calls = tmp_path / "calls"
        calls.write_text("")
        record = f'echo "$(basename "$0") $*" >> {calls}; case "$*" in {failing}) exit 1;; esac'
        for name in ("bin/nvidia-smi", "bin/make", ".venv/bin/python"):
            stub(tmp_path / name, record)
        script = shutil.copy(project.ROOT / ".ci/gpu", stub(tmp_path / ".ci/gpu", ""))
        rows = tmp_path / "cuda/sm80/plan/tuned.def"
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("{8, 9, true},  // a card\n")
        return shell(f"{script}", tmp_path, **environment), calls.read_text().splitlines()

    return run


def test_what_a_gpu_is_asked(gpu):
    done, calls = gpu("nothing", STAGED="a" * 40)
    assert done.returncode == 0 and gpu_job.FIGURES in done.stdout.splitlines()
    assert f"python tools/release.py try {'a' * 40}" in calls and "make test" not in calls
    done, calls = gpu("nothing")
    assert done.returncode == 0 and "make test" in calls and not [call for call in calls if "release.py" in call]
    measured = [call for call in calls if "peers.py" in call]
    assert len(measured) == 6 and all("--limit 1.02" in call for call in measured)
    done, calls = gpu("nothing", STAGED="")
    assert done.returncode == 1 and "STAGED is empty" in done.stderr and calls == []


def test_the_first_run_on_a_card(gpu):
    """Beyond the limit, the choice is withheld and the figures are taken again; a release needs that committed."""
    done, calls = gpu("*bench/chosen/linear*")
    assert done.returncode == 0 and "withheld: " in done.stdout and "{8, 9, true},  // a card" in done.stdout
    assert calls.index("python tools/tune.py --withhold") < calls.index("make build")
    assert len([call for call in calls if "bench/withheld/" in call]) == 6
    for failing in ("*bench/*/linear*", "*bench/chosen/linear*|*--withhold*"):  # both figures fail; withholding fails
        done, _ = gpu(failing)
        assert done.returncode == 1 and gpu_job.FIGURES in done.stdout
    done, calls = gpu("*bench/chosen/linear*", STAGED="a" * 40)
    assert done.returncode == 1 and "python tools/tune.py --withhold" not in calls
