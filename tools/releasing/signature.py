"""Signs variants with the identity of a GitHub workflow, and verifies them as `kernels verify-signature` does."""

import subprocess
import sys
from pathlib import Path

from kernels.verify import GitHubWorkflowPolicy, VerificationResult, verify_variant

from .variants import variants


def sign(build: Path, repository: str, workflow: str) -> str | None:
    """Signs every variant's metadata, which has the digests of its files. `workflow` is a GITHUB_WORKFLOW_REF."""
    for variant in variants(build):
        metadata = variant / "metadata.json"
        command = [sys.executable, "-m", "sigstore", "sign", "--bundle", f"{metadata}.sigstore", str(metadata)]
        subprocess.run(command, check=True)
    found = faults(build, repository, workflow)
    return "\n".join(f"error: {fault}" for fault in found) or None


def faults(build: Path, repository: str, workflow: str) -> list[str]:
    """The variants that are not signed by the workflow, or not what it signed."""
    policy = GitHubWorkflowPolicy(repo_id=repository, signer_uris=[f"https://github.com/{workflow}"])
    results = {variant.name: verify_variant(variant, [policy]) for variant in variants(build)}
    return [f"{name}: {found}" for name, found in results.items() if not isinstance(found, VerificationResult.Success)]
