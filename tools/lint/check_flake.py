#!/usr/bin/env python3
"""Checks flake.lock for consistency with itself and with flake.nix, without Nix's network: part of `make lint`.

Releases are built from the lock, so every input has to be present, pinned to a commit and a content hash. Nix's own
evaluator reads the inputs of flake.nix, if it is installed.
"""

import base64
import binascii
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    lock = json.loads((ROOT / "flake.lock").read_text())
    faults = list(lock_faults(lock))
    if shutil.which("nix-instantiate"):
        faults += input_faults(flake_inputs(ROOT / "flake.nix"), lock)
    else:
        print("left out: flake.nix against flake.lock, for want of nix-instantiate (Debian, Ubuntu: install nix-bin)")
    sys.exit("\n".join(f"flake.lock: {fault}" for fault in faults) or None)


def flake_inputs(flake: Path) -> dict:
    """Returns the inputs of flake.nix. Ends the program with Nix's message if Nix cannot read the file."""
    command = ["nix-instantiate", "--store", "dummy://", "--eval", "--strict", "--json"]
    done = subprocess.run([*command, "--expr", f"(import {flake}).inputs"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{flake.name}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def input_faults(inputs: dict, lock: dict) -> Iterator[str]:
    """Lists the differences between the lock and these inputs."""
    locked = lock["nodes"][lock["root"]].get("inputs", {})
    for name in sorted(inputs.keys() - locked.keys()):
        yield f"has no {name}, an input of flake.nix: run `nix flake lock`"
    for name in sorted(locked.keys() - inputs.keys()):
        yield f"has {name}, which is no input of flake.nix: run `nix flake lock`"
    for name in sorted(locked.keys() & inputs.keys()):
        original = lock["nodes"].get(_resolve(lock, [name]), {}).get("original")
        if original != origin(inputs[name]["url"]):
            yield f"takes {name} from {original}, and flake.nix from {inputs[name]['url']}"


def origin(url: str) -> dict:
    """The URL of an input in the form of a lock: `github:owner/repo`, `github:owner/repo/<branch or commit>`."""
    kind, _, place = url.partition(":")
    owner, repo, *rest = place.split("/", 2)
    reference = {"rev" if _is_commit(rest[0]) else "ref": rest[0]} if rest else {}
    return {"type": kind, "owner": owner, "repo": repo} | reference


def lock_faults(lock: dict) -> Iterator[str]:
    """Lists the inconsistencies within a lock."""
    if lock.get("version") != 7:
        yield f"has version {lock.get('version')}, and 7 is what this check knows"
    nodes = lock["nodes"]
    reached, waiting = set(), [lock["root"]]
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        reached.add(node)
        for name, target in nodes[node].get("inputs", {}).items():
            found = _resolve(lock, target) if isinstance(target, list) else target
            if found in nodes:
                waiting.append(found)
            else:
                yield f"{node}: its input {name} is not locked"
    for node in sorted(nodes.keys() - reached):
        yield f"{node}: is no input of any other"
    for node in sorted(reached - {lock["root"]}):
        yield from (f"{node}: {fault}" for fault in _pin_faults(nodes[node]))


def _pin_faults(node: dict) -> Iterator[str]:
    original, locked = node.get("original", {}), node.get("locked", {})
    if not _is_commit(locked.get("rev", "")):
        yield f"rev is {locked.get('rev')}, not a commit of 40 hexadecimal digits"
    if not _is_hash(locked.get("narHash", "")):
        yield f"narHash is {locked.get('narHash')}, not a SHA-256"
    for key, value in original.items():
        if key != "ref" and locked.get(key) != value:
            yield f"was asked for with the {key} {value} and locked with {locked.get(key)}"


def _resolve(lock: dict, path: list[str]) -> str | None:
    """The node that a path of inputs leads to from the root, as in `inputs.x.follows`."""
    node = lock["root"]
    for name in path:
        target = lock["nodes"].get(node, {}).get("inputs", {}).get(name)
        node = _resolve(lock, target) if isinstance(target, list) else target
    return node


def _is_commit(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{40}", text) is not None


def _is_hash(text: str) -> bool:
    algorithm, _, digest = text.partition("-")
    try:
        return algorithm == "sha256" and len(base64.b64decode(digest, validate=True)) == 32
    except binascii.Error:
        return False


if __name__ == "__main__":
    main()
