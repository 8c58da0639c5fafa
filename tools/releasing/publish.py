"""Publishes a build as `kernel-builder upload` does, through the Hub's own client: the card on `main`, the variants and
the benchmarks on the branch of the version."""

import ast
from pathlib import Path

import jinja2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

import project

from . import api
from .variants import files, variants


def branch() -> str:
    return f"v{project.version()}"


def published_variants(hub: HfApi) -> set[str]:
    """The variants on the version's branch; none where there is no such branch yet."""
    return {path.split("/")[1] for path in _published_files(hub) if path.startswith("build/")}


def dropped_variants(build: Path, published: set[str]) -> list[str]:
    """The faults of a build that does not replace every variant that users of the version have."""
    return [
        f"{name} is published on {branch()} and missing in the build: build it too, or raise the version in build.toml"
        for name in sorted(published - {folder.name for folder in variants(build)})
    ]


def publish(build: Path, hub: HfApi) -> str:
    """Uploads all variants of the build and returns the commit. Variants published before are replaced file by file."""
    repo = {"repo_id": project.repo_id(), "repo_type": "kernel"}
    hub.create_repo(**repo, exist_ok=True)
    if branch() not in _branches(hub):
        hub.create_branch(**repo, branch=branch())
    card = CommitOperationAdd("README.md", render_card().encode())
    hub.create_commit(**repo, operations=[card], commit_message=f"Card of {branch()}")
    added = {f"build/{folder.name}/{place}": path for folder in variants(build) for place, path in files(folder)}
    benchmarks = (project.ROOT / "benchmarks").glob("benchmark*.py")
    added.update({f"benchmarks/{path.name}": path for path in benchmarks})
    replaced = tuple(f"build/{folder.name}/" for folder in variants(build))
    gone = [path for path in _published_files(hub) if path not in added and path.startswith(replaced)]
    operations = [CommitOperationDelete(path) for path in gone]
    operations += [CommitOperationAdd(place, path) for place, path in sorted(added.items())]
    return hub.create_commit(
        **repo, operations=operations, commit_message=f"{project.name()} {branch()}", revision=branch()
    ).oid


def render_card() -> str:
    """CARD.md as kernel-builder fills it."""
    layers = project.package() / "layers.py"
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((project.ROOT / "CARD.md").read_text()).render(
        repo_id=project.repo_id(),
        version=project.version(),
        license=project.config()["general"]["license"].lower(),
        functions=[name for name in api.exported() if name != "layers"],
        layers=[node.name for node in ast.parse(layers.read_text()).body if isinstance(node, ast.ClassDef)],
        has_benchmark=(project.ROOT / "benchmarks/benchmark.py").exists(),
    )


def _branches(hub: HfApi) -> list[str]:
    return [reference.name for reference in hub.list_repo_refs(project.repo_id(), repo_type="kernel").branches]


def _published_files(hub: HfApi) -> list[str]:
    if not hub.repo_exists(project.repo_id(), repo_type="kernel") or branch() not in _branches(hub):
        return []
    return hub.list_repo_files(project.repo_id(), repo_type="kernel", revision=branch())
