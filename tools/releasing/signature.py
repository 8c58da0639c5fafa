"""Signs variants as the release workflow, and verifies them as `kernels verify-signature` does."""

import subprocess
import sys
from pathlib import Path

from kernels.verify import GitHubWorkflowPolicy, VerificationResult, verify_variant

import project

from .rules.variants import variants


def sign(build: Path, tag: str) -> str | None:
    """Signs every variant's metadata, which has the digests of its files, as the workflow that runs this."""
    for variant in variants(build):
        metadata = variant / "metadata.json"
        command = [sys.executable, "-m", "sigstore", "sign", "--bundle", f"{metadata}.sigstore", str(metadata)]
        subprocess.run(command, check=True)
    return "\n".join(f"error: {fault}" for fault in faults(build, tag)) or None


def policy(*tags: str) -> GitHubWorkflowPolicy:
    """Accepts what the workflow of releases signed for one of the tags, in the repository that build.toml names."""
    source = project.config()["general"]["source"]
    signers = [f"{source}/.github/workflows/release.yaml@refs/tags/{tag}" for tag in tags]
    return GitHubWorkflowPolicy(repo_id=source.removeprefix("https://github.com/"), signer_uris=signers)


def faults(build: Path, tag: str) -> list[str]:
    """The variants that are not signed by the workflow of releases for the tag, or not what it signed."""
    results = {variant.name: verify_variant(variant, [policy(tag)]) for variant in variants(build)}
    return [f"{name}: {found}" for name, found in results.items() if not isinstance(found, VerificationResult.Success)]
