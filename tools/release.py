#!/usr/bin/env python3
"""Checks a build before its release, and rehearses the release: `make release-check`, `make release-dry-run`.

kernel-builder builds the releases themselves, in .github/workflows/release.yaml, which calls the other commands.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OIDCError
from rich.console import Console

import project
from releasing import check, dry_run, publish, signature
from releasing.rules import api

console = Console(width=100, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.__doc__, description=command.__doc__)
        subparser.set_defaults(command=command)
        if command in (check_tag, sign):
            subparser.add_argument("tag")
        elif command in (try_staged, promote):
            subparser.add_argument("revision", type=revision, help="a commit or branch of the Hub's repository")
        if command not in (check_tag, try_staged, promote, rehearse, smoke):
            subparser.add_argument("--build", type=Path, default=project.BUILD, help="the folder of the variants")
    options = vars(parser.parse_args())
    command = options.pop("command")
    sys.exit(command(**options))


def revision(text: str) -> str:
    if not text:  # the Hub would read an empty name as the main branch
        raise argparse.ArgumentTypeError("empty: was anything staged?")
    return text


def check_build(build: Path) -> str | None:
    """Checks a build: the API of the version, the package's Python, its layers, every variant, a second build."""
    with tempfile.TemporaryDirectory() as folder:
        return check.run(build, Path(folder), console)


def snapshot(build: Path) -> None:
    """Records the public API of this version: once, when the version is new."""
    api.snapshot().write_text("\n".join(api.describe(check.load(build))) + "\n")
    console.print(f"wrote {api.snapshot().relative_to(project.ROOT)}")


def stage(build: Path) -> str | None:
    """Uploads a build to the staging branch of the Hub's repository, and prints the commit."""
    return _print_commit(lambda hub: publish.publish(build, hub, publish.STAGING))


def try_staged(revision: str) -> int:
    """Puts the variants of a revision of the Hub's repository into build/, and runs test_kernels_ci.py on them."""
    shutil.rmtree(project.BUILD, ignore_errors=True)
    publish.fetch(revision, HfApi(), project.ROOT)
    return subprocess.run([sys.executable, "-m", "pytest", "tests/test_kernels_ci.py"], cwd=project.ROOT).returncode


def promote(revision: str) -> str | None:
    """Publishes a staged commit on the branch of the version, and prints the new commit."""
    with tempfile.TemporaryDirectory() as folder:
        return _print_commit(lambda hub: publish.promote(revision, hub, Path(folder)))


def _print_commit(write: Callable[[HfApi], str]) -> str | None:
    # The Hub gives a token for one hour to the workflow that runs this, a trusted publisher of the repository.
    os.environ["HF_OIDC_RESOURCE"] = f"kernels/{project.repo_id()}"
    try:
        console.print(write(HfApi()))
    except (publish.PublishError, OIDCError, HfHubHTTPError) as error:
        return f"error: {error}"


def check_tag(tag: str) -> str | None:
    """Checks that a tag is the newest of this version (v1.0, v1.1, ... release version 1), and its commit on main."""
    version = project.version()
    if not re.fullmatch(rf"v{version}\.\d+", tag):
        return f"error: the tag is {tag}, and build.toml says version {version}: v{version}.<number> is needed"
    if not _holds("refs/remotes/origin/main", tag):
        return f"error: the commit of {tag} is not on origin's main: merge it first"
    command = ["git", "tag", "--list", f"v{version}.*"]
    tags = subprocess.run(command, cwd=project.ROOT, capture_output=True, text=True, check=True).stdout.split()
    newest = max(tags, key=lambda name: int(name.split(".")[1]))
    if newest != tag:
        return f"error: {newest} came after {tag}: a release goes on from it"
    for before in tags:
        if not _holds(f"refs/tags/{tag}", before):
            return f"error: the commit of {tag} is without that of {before}, which it would replace"


def _holds(reference: str, tag: str) -> bool:
    """True if the commit of a tag is the commit of a reference, or an ancestor of it."""
    command = ["git", "merge-base", "--is-ancestor", f"refs/tags/{tag}", reference]
    return subprocess.run(command, cwd=project.ROOT).returncode == 0


def check_gate(build: Path) -> str | None:
    """Checks variants that Nix built, and that they include all that the Hub has for this version."""
    return check.gate(build, publish.published_variants(HfApi()), console)


def sign(build: Path, tag: str) -> str | None:
    """Signs the metadata of every variant, and verifies that the release workflow signed it for the tag."""
    return signature.sign(build, tag)


def smoke() -> int:
    """Loads the published kernel from the Hub in a clean process, fuses a model and compares."""
    return dry_run.smoke()


def rehearse() -> str | None:
    """Rehearses a release in a fresh clone: build, check, publish to a Hub on loopback, load it and fuse a model."""
    with tempfile.TemporaryDirectory() as folder:
        return dry_run.run(Path(folder), console)


COMMANDS = {
    "check": check_build,
    "snapshot": snapshot,
    "stage": stage,
    "try": try_staged,
    "promote": promote,
    "dry-run": rehearse,
    "tag": check_tag,
    "gate": check_gate,
    "sign": sign,
    "smoke": smoke,
}

if __name__ == "__main__":
    main()
