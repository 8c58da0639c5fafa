"""Out of memory, the functions raise torch's own error, which callers recognise by class and message.

This file is also a program, run in its own process: later tests would find no memory.
"""

import json
import os
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forks
import machine

ROWS, FEATURES, HIDDEN = 20_000, 64, 8_000  # the hidden values take 320 MB
ROOM = 200 << 20
NEEDS_LESS = {"gated_mlp"} if machine.device_type() == "cpu" else ()  # holds some rows' hidden values


def allow_no_more() -> None:
    """Limits the further memory of this process to ROOM."""
    if machine.device_type() == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / total)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)


def random(*size):
    return torch.randn(*size, dtype=torch.bfloat16, device=machine.device_type()) / size[-1] ** 0.5


def forwards(fused_mlp):
    """Returns pairs of calls by name: ours and torch's."""
    x, gate, up, down = random(ROWS, FEATURES), *(random(HIDDEN, FEATURES) for _ in range(2)), random(FEATURES, HIDDEN)
    followed, wide = x.clone().requires_grad_(), random(1, HIDDEN).expand(ROWS, -1)

    def eager(x):
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def fused(x):
        return fused_mlp.gated_mlp(x, gate, up, down, activation="silu")

    return {
        "gated_mlp": (lambda: fused(x), lambda: eager(x)),
        "linear": (lambda: fused_mlp.linear(x, gate, activation="silu"), lambda: F.silu(F.linear(x, gate))),
        "act_and_mul": (lambda: fused_mlp.act_and_mul(wide, wide, "silu"), lambda: F.silu(wide) * wide),
        "gated_mlp, recorded": (lambda: fused(followed), lambda: eager(followed)),
    }


def backwards(fused_mlp):
    """Returns the same for a backward whose forward had enough memory."""
    made = {"dtype": torch.bfloat16, "device": machine.device_type(), "requires_grad": True}
    gate, up = (torch.ones(ROWS, HIDDEN, **made) for _ in range(2))
    both = fused_mlp.act_and_mul(gate, up, "silu"), F.silu(gate) * up
    return {"act_and_mul": tuple(lambda y=y: torch.autograd.grad(y, (gate, up), y.detach()) for y in both)}


def error_of(call) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]
    return ["no error", ""]


@pytest.mark.parametrize("calls", [forwards, backwards])
def test_errors_are_torchs(calls):
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = forks.run(Path(__file__), calls.__name__, env=paths)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (found, expected) in json.loads(done.stdout.splitlines()[-1]).items():
        assert "memory" in expected[1], (name, expected)
        if found[0] == "no error":
            assert name in NEEDS_LESS, name
        else:
            assert found[0] == expected[0] and "memory" in found[1], (name, found)


if __name__ == "__main__":
    import kernels

    import project

    kernel = kernels.get_kernel(
        project.repo_id(), version=project.version(), backend=machine.device_type(), trust_remote_code=True
    )
    pairs = {"forwards": forwards, "backwards": backwards}[sys.argv[1]](kernel)
    allow_no_more()
    print(json.dumps({name: [error_of(call) for call in pair] for name, pair in pairs.items()}))
