"""flake.lock: what tools/lint/check_flake.py finds, on this tree and where a fault is planted."""

import copy
import json
import shutil
import subprocess
import sys

import pytest

import project
from lint import check_flake

LOCK = json.loads((project.ROOT / "flake.lock").read_text())
INPUTS = {"kernel-builder": {"url": "github:huggingface/kernels"}}


@pytest.fixture
def lock() -> dict:
    """The lock, to plant a fault in."""
    return copy.deepcopy(LOCK)


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


def test_nothing_promises_what_the_flake_has_not():
    """kernel-builder's outputs have no checks, so that `nix flake check` would check nothing."""
    places = [*project.ROOT.glob("*.md"), *(project.ROOT / "docs").glob("*.md"), project.ROOT / "Makefile"]
    places += (project.ROOT / ".github/workflows").iterdir()
    assert not [place for place in places if "flake check" in place.read_text()]


def a_short_commit(lock):
    lock["nodes"]["nixpkgs"]["locked"]["rev"] = "ec1a112"


def a_branch_for_a_commit(lock):
    del lock["nodes"]["systems"]["locked"]["rev"]


def another_commit_than_asked_for(lock):
    lock["nodes"]["nixpkgs"]["locked"]["rev"] = "0" * 40


def another_owner(lock):
    lock["nodes"]["kernel-builder"]["locked"]["owner"] = "somebody"


def a_cut_hash(lock):
    lock["nodes"]["flake-utils"]["locked"]["narHash"] = "sha256-l0KFg5HjrsfsO/JpG+r7fRrqm12kzFHyUHqHCVpM"


def no_hash(lock):
    del lock["nodes"]["flake-utils"]["locked"]["narHash"]


def a_missing_node(lock):
    del lock["nodes"]["systems"]


def a_dangling_follows(lock):
    lock["nodes"]["rust-overlay"]["inputs"]["nixpkgs"] = ["kernel-builder", "nixpkgs-stable"]


def an_unreachable_node(lock):
    lock["nodes"]["spare"] = lock["nodes"]["systems"]


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (a_short_commit, "nixpkgs: rev is ec1a112, not a commit"),
        (a_branch_for_a_commit, "systems: rev is None, not a commit"),
        (another_commit_than_asked_for, "nixpkgs: was asked for with the rev ec1a"),
        (another_owner, "kernel-builder: was asked for with the owner huggingface and locked with somebody"),
        (a_cut_hash, "flake-utils: narHash is sha256-l0KFg5HjrsfsO/JpG+r7fRrqm12kzFHyUHqHCVpM, not"),
        (no_hash, "flake-utils: narHash is None, not a SHA-256"),
        (a_missing_node, "flake-utils: its input systems is not locked"),
        (a_dangling_follows, "rust-overlay: its input nixpkgs is not locked"),
        (an_unreachable_node, "spare: is no input of any other"),
    ],
)
def test_faults_of_the_lock(lock, plant, fault):
    plant(lock)
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


def test_without_nix_it_says_what_is_left_out(tmp_path):
    script = project.ROOT / "tools/lint/check_flake.py"
    done = subprocess.run([sys.executable, script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("left out: flake.nix against flake.lock")
