#!/usr/bin/env python3
"""Checks a build before it is released, and rehearses the release: `make release-check`, `make release-dry-run`.

Releases themselves are built and published by kernel-builder, in .github/workflows/release.yaml, which calls `tag`,
`gate`, `sign` and `smoke`.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi
from rich.console import Console

import project
from releasing import api, check, dry_run, publish, signature

console = Console(width=100, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.__doc__, description=command.__doc__)
        subparser.set_defaults(command=command)
        if command is check_tag:
            subparser.add_argument("tag")
        elif command not in (rehearse, smoke):
            subparser.add_argument("--build", type=Path, default=project.BUILD, help="the folder of the variants")
    options = vars(parser.parse_args())
    command = options.pop("command")
    sys.exit(command(**options))


def check_build(build: Path) -> str | None:
    """Checks a build: the API of the version, the package's Python, its layers, every variant, a second build."""
    with tempfile.TemporaryDirectory() as folder:
        return check.run(build, Path(folder), console)


def snapshot(build: Path) -> None:
    """Writes the public API of this version down: once, when the version is new."""
    api.snapshot().write_text("\n".join(api.describe(check.load(build))) + "\n")
    console.print(f"wrote {api.snapshot().relative_to(project.ROOT)}")


def publish_build(build: Path) -> str | None:
    """Publishes a build to a Hub on loopback, whose address HF_ENDPOINT gives, and prints the commit."""
    hub = HfApi()
    if urlsplit(hub.endpoint).hostname != "127.0.0.1":
        return f"error: {hub.endpoint} is not on loopback; kernel-builder publishes to the Hub itself"
    if dropped := publish.dropped_variants(build, publish.published_variants(hub)):
        return "\n".join(f"error: {fault}" for fault in dropped)
    console.print(publish.publish(build, hub))


def check_tag(tag: str) -> str | None:
    """Checks that a tag is one of this version: v1.0, v1.1, ... release version 1."""
    version = project.version()
    if not re.fullmatch(rf"v{version}\.\d+", tag):
        return f"error: the tag is {tag}, and build.toml says version {version}: v{version}.<number> is needed"


def check_gate(build: Path) -> str | None:
    """Checks variants that Nix built, and that none is missing which the Hub has of this version."""
    return check.gate(build, publish.published_variants(HfApi()), console)


def sign(build: Path) -> str | None:
    """Signs the metadata of every variant as the workflow that runs this, and verifies it as `kernels` does."""
    return signature.sign(build, os.environ["GITHUB_REPOSITORY"], os.environ["GITHUB_WORKFLOW_REF"])


def smoke() -> int:
    """Loads the published kernel from the Hub in a clean process, fuses a model and compares."""
    return dry_run.smoke()


def rehearse() -> str | None:
    """From a fresh clone: builds, checks, publishes to a Hub on loopback, loads from there and fuses a model."""
    with tempfile.TemporaryDirectory() as folder:
        return dry_run.run(Path(folder), console)


COMMANDS = {
    "check": check_build,
    "snapshot": snapshot,
    "publish": publish_build,
    "dry-run": rehearse,
    "tag": check_tag,
    "gate": check_gate,
    "sign": sign,
    "smoke": smoke,
}

if __name__ == "__main__":
    main()
