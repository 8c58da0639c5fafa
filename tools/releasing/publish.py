"""Publishes a build through the Hub's client in two steps: to a branch where it is tested as users would get it, and
from there to the version's branch, with its card on `main`. The files are laid out as `kernel-builder upload` does.
That command is not used because it always creates the repository, which a token for one repository may not do."""

import ast
from pathlib import Path

import jinja2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile

import project

from .rules import api
from .rules.variants import bytecode, files, variants

REPO = {"repo_id": project.repo_id(), "repo_type": "kernel"}
STAGING = "staging"


class PublishError(Exception):
    """An error whose message fits one line."""


def branch() -> str:
    return f"v{project.version()}"


def published_variants(hub: HfApi) -> set[str]:
    """The variants on the version's branch; none if there is no such branch yet."""
    return {path.split("/")[1] for path in _published_files(hub, branch()) if path.startswith("build/")}


def dropped_variants(build: Path, published: set[str]) -> list[str]:
    """The faults of a build that does not replace every variant that users of the version have."""
    return [
        f"{name} is published on {branch()} and missing in the build: build it too, or raise the version in build.toml"
        for name in sorted(published - {folder.name for folder in variants(build)})
    ]


def publish(build: Path, hub: HfApi, to: str) -> str:
    """Makes a branch hold exactly the variants of the build and the benchmarks, and returns the commit.

    The repository must exist: a token for one repository may not create another.
    """
    if found := [f"{folder.name} {fault}" for folder in variants(build) for fault in bytecode(folder)]:
        raise PublishError("; ".join(found))
    if not hub.repo_exists(**REPO):
        raise PublishError(f"the Hub has no kernel repository {project.repo_id()}: have it approved and created")
    if to not in _branches(hub):
        hub.create_branch(**REPO, branch=to)
    added = {f"build/{folder.name}/{place}": path for folder in variants(build) for place, path in files(folder)}
    benchmarks = (project.ROOT / "benchmarks").glob("benchmark*.py")
    added.update({f"benchmarks/{path.name}": path for path in benchmarks})
    published = _published_files(hub, to)
    gone = [path for path in published if path not in added and path.startswith(("build/", "benchmarks/"))]
    operations = [CommitOperationDelete(path) for path in gone]
    operations += [CommitOperationAdd(place, path) for place, path in sorted(added.items())]
    return hub.create_commit(
        **REPO, operations=operations, commit_message=f"{project.name()} {branch()}", revision=to
    ).oid


def fetch(revision: str, hub: HfApi, folder: Path) -> None:
    """Downloads the variants of a revision into the folder's build/, unchanged."""
    hub.snapshot_download(**REPO, revision=revision, local_dir=folder, allow_patterns="build/*")


def promote(staged: str, hub: HfApi, folder: Path) -> str:
    """Publishes a staged commit on the version's branch, and returns the new commit. `folder` is temporary."""
    fetch(staged, hub, folder)
    if dropped := dropped_variants(folder / "build", published_variants(hub)):
        raise PublishError("; ".join(dropped))
    commit = publish(folder / "build", hub, branch())
    if (tried := _contents(hub, staged)) != (published := _contents(hub, commit)):
        raise PublishError(f"{branch()} holds other files than were staged: {sorted(tried ^ published)}")
    card = CommitOperationAdd("README.md", render_card().encode())
    hub.create_commit(**REPO, operations=[card], commit_message=f"Card of {branch()}")
    return commit


def render_card() -> str:
    """CARD.md, filled as by kernel-builder."""
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
    return [reference.name for reference in hub.list_repo_refs(**REPO).branches]


def _published_files(hub: HfApi, on: str) -> list[str]:
    if not hub.repo_exists(**REPO) or on not in _branches(hub):
        return []
    return hub.list_repo_files(**REPO, revision=on)


def _contents(hub: HfApi, revision: str) -> set[tuple[str, str]]:
    """The files of a revision that users load, with their hashes."""
    entries = hub.list_repo_tree(**REPO, revision=revision, path_in_repo="build", recursive=True)
    found = [entry for entry in entries if isinstance(entry, RepoFile)]
    return {(file.path, file.lfs.sha256 if file.lfs else file.blob_id) for file in found}
