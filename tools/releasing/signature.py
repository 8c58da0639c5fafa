"""Signs variants as the release workflow, and verifies them as `kernels verify-signature` does."""

import subprocess
import sys
from pathlib import Path

from kernels.verify import GitHubWorkflowPolicy, VerificationResult, verify_variant

import project

from .rules.variants import variants


def sign(build: Path, tag: str) -> str | None:
    """Signs every variant's metadata, which contains the digests of its files, with the identity of this workflow."""
    for variant in variants(build):
        metadata = variant / "metadata.json"
        command = [sys.executable, "-m", "sigstore", "sign", "--bundle", f"{metadata}.sigstore", str(metadata)]
        subprocess.run(command, check=True)
    return "\n".join(f"error: {fault}" for fault in faults(build, tag)) or None


def policy(*tags: str) -> GitHubWorkflowPolicy:
    """Accepts signatures of the release workflow for one of the tags, in the repository that build.toml names."""
    source = project.config()["general"]["source"]
    signers = [f"{source}/.github/workflows/release.yaml@refs/tags/{tag}" for tag in tags]
    return GitHubWorkflowPolicy(repo_id=source.removeprefix("https://github.com/"), signer_uris=signers)


def faults(build: Path, tag: str) -> list[str]:
    """The variants that the release workflow did not sign for the tag, or that changed since."""
    results = {variant.name: verify_variant(variant, [policy(tag)]) for variant in variants(build)}
    return [f"{name}: {found}" for name, found in results.items() if not isinstance(found, VerificationResult.Success)]
