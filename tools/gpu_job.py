#!/usr/bin/env python3
"""Runs .ci/gpu of a commit on a GPU of Hugging Face Jobs, in the kernel's organisation, and fails if it fails.

Writes its output (log.txt), the benchmark figures (figures.json) and a summary of them (summary.md). The token in
HF_TOKEN must be allowed to start jobs; the job does not get it.
"""

import argparse
import re
import sys
from pathlib import Path

from huggingface_hub import HfApi, JobStage

import project

# The CUDA of the torch that requirements/constraints.txt names: nvcc and torch must agree.
IMAGE = "nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6"
SCRIPT = """set -euo pipefail
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y git make g++ python3-venv > /dev/null
git clone --quiet "$REPOSITORY" kernel
cd kernel
git checkout --quiet --detach "$COMMIT"
exec .ci/gpu
"""
PLAIN = {"NO_COLOR": "1", "COLUMNS": "100", "TQDM_DISABLE": "1"}
FIGURES = "== figures"  # .ci/gpu prints it above the JSON of the benchmark
SHOWN = 60  # lines: the benchmark's table, and the end of the tests' output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", required=True, help="the machine, as `hf jobs hardware` lists them")
    parser.add_argument("--repository", required=True, help="the URL to clone, without credentials")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--staged", type=staged, default="tree", help="the Hub's commit to test (default: the tree)")
    parser.add_argument("--timeout", default="90m")
    parser.add_argument("--out", type=Path, default=project.BUILD / "gpu")
    sys.exit(run(HfApi(), **vars(parser.parse_args())))


def staged(text: str) -> str:
    if not re.fullmatch("tree|[0-9a-f]{40}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a commit nor 'tree': was anything staged?")
    return text


def run(hub: HfApi, flavor: str, repository: str, commit: str, staged: str, timeout: str, out: Path) -> str | None:
    """Starts the job, follows its output, writes the files and returns the error, if any."""
    namespace = project.repo_id().split("/")[0]
    environment = PLAIN | {"REPOSITORY": repository, "COMMIT": commit, "STAGED": staged}
    command = ["bash", "-c", SCRIPT]
    job = hub.run_job(
        image=IMAGE, command=command, env=environment, flavor=flavor, timeout=timeout, namespace=namespace
    )
    print(job.url, flush=True)
    lines = []
    try:
        for line in hub.fetch_job_logs(job_id=job.id, follow=True, namespace=namespace):
            lines.append(line.rstrip("\n"))
            print(lines[-1], flush=True)
        stage = hub.wait_for_job(job.id, namespace=namespace).status.stage
    except BaseException:  # also when CI cancels: a GPU costs until its job ends
        hub.cancel_job(job_id=job.id, namespace=namespace)
        raise
    finally:
        write(out, flavor, lines)
    if stage != JobStage.COMPLETED:
        return f"error: the job on {flavor} ended as {stage.value}: {job.url}"


def write(out: Path, flavor: str, lines: list[str]) -> None:
    end = lines.index(FIGURES) if FIGURES in lines else len(lines)
    log, figures = lines[:end], lines[end + 1 :]
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("\n".join(log) + "\n")
    if figures:
        (out / "figures.json").write_text("\n".join(figures) + "\n")
    (out / "summary.md").write_text("\n".join([f"## {flavor}", "```", *log[-SHOWN:], "```", ""]))


if __name__ == "__main__":
    main()
