"""flake.lock: tools/lint/check_flake.py finds nothing on this tree, and finds planted faults."""

import copy
import json
import shutil

import pytest

import project
from lint import check_flake

LOCK = json.loads((project.ROOT / "flake.lock").read_text())
INPUTS = {"kernel-builder": {"url": "github:huggingface/kernels"}}


def test_the_lock_is_whole():
    assert list(check_flake.lock_faults(LOCK)) == []
    assert list(check_flake.input_faults(INPUTS, LOCK)) == []


@pytest.mark.skipif(not shutil.which("nix-instantiate"), reason="needs nix-instantiate (Debian, Ubuntu: nix-bin)")
def test_nix_reads_the_flake(tmp_path):
    assert check_flake.flake_inputs(project.ROOT / "flake.nix") == INPUTS
    broken = tmp_path / "flake.nix"
    broken.write_text((project.ROOT / "flake.nix").read_text().replace(";", "", 1))
    with pytest.raises(SystemExit, match=r"flake\.nix: .*syntax error"):
        check_flake.flake_inputs(broken)


CUT = "sha256-l0KFg5HjrsfsO/JpG+r7fRrqm12kzFHyUHqHCVpM"
FAULTS = {
    "nixpkgs: rev is ec1a112, not a commit": lambda nodes: nodes["nixpkgs"]["locked"].update(rev="ec1a112"),
    "systems: rev is None, not a commit": lambda nodes: nodes["systems"]["locked"].pop("rev"),
    "nixpkgs: was asked for with the rev ec1a": lambda nodes: nodes["nixpkgs"]["locked"].update(rev="0" * 40),
    "kernel-builder: was asked for with the owner huggingface and locked with somebody": lambda nodes: nodes[
        "kernel-builder"
    ]["locked"].update(owner="somebody"),
    f"flake-utils: narHash is {CUT}, not": lambda nodes: nodes["flake-utils"]["locked"].update(narHash=CUT),
    "flake-utils: narHash is None, not a SHA-256": lambda nodes: nodes["flake-utils"]["locked"].pop("narHash"),
    "flake-utils: its input systems is not locked": lambda nodes: nodes.pop("systems"),
    "rust-overlay: its input nixpkgs is not locked": lambda nodes: nodes["rust-overlay"]["inputs"].update(
        nixpkgs=["kernel-builder", "nixpkgs-stable"]
    ),
    "spare: is no input of any other": lambda nodes: nodes.update(spare=nodes["systems"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_lock(fault):
    lock = copy.deepcopy(LOCK)
    FAULTS[fault](lock["nodes"])
    assert any(found.startswith(fault) for found in check_flake.lock_faults(lock))


@pytest.mark.parametrize(
    ("inputs", "fault"),
    [
        ({}, "has kernel-builder, which is no input of flake.nix"),
        (INPUTS | {"nixpkgs": {"url": "github:NixOS/nixpkgs"}}, "has no nixpkgs, an input of flake.nix"),
        ({"kernel-builder": {"url": "github:somebody/kernels"}}, "takes kernel-builder from"),
        ({"kernel-builder": {"url": "github:huggingface/kernels/main"}}, "takes kernel-builder from"),
    ],
)
def test_faults_between_the_flake_and_the_lock(inputs, fault):
    assert [found[: len(fault)] for found in check_flake.input_faults(inputs, LOCK)] == [fault]
