"""More than one device: tensor parallelism, FSDP2, DDP, and transformers' own plan, in two processes.

They run on CPUs through gloo, and on two GPUs, if there are, through NCCL.
"""

import functools
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import forks
from distributed_cases import CASES, refusal
from modules import Gated, PackedGated
from safety import Blocks, assert_close, pair

RANKS = 2

has_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="NCCL needs two GPUs")


@functools.cache
def results(backend):
    """The output of each rank."""
    script = Path(__file__).with_name("distributed_cases.py")

    def start(rank):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        return forks.run(script, backend, folder, env=os.environ | place | {"PYTHONPATH": os.pathsep.join(sys.path)})

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RANKS) as pool:
        for done in pool.map(start, range(RANKS)):
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=has_gpus)])
@pytest.mark.parametrize("case", CASES)
def test_distributed(backend, case):
    """Outputs and gradients match those of one process, and explain reports the same on every rank."""
    if (reason := refusal(case, backend)) is not None:
        pytest.skip(reason)
    seen = [result[case] for result in results(backend)]
    assert not any(isinstance(one, str) for one in seen), "\n".join(str(one) for one in seen)
    assert seen[0] == seen[1]
    is_fused = not case.startswith(("tensor", "transformers"))
    if case.startswith("FSDP2") and "by model" not in case:  # sharded except during a call; a root model stays whole
        is_fused = False
        assert all("DTensor" in reason or "FSDPLinear" in reason for reason in seen[0]["reasons"])
    assert ("fused" in seen[0]["states"]) == is_fused


@has_gpus
@pytest.mark.parametrize("kind", [Gated, PackedGated])
def test_threads_of_data_parallel(fused_mlp, kind):
    """nn.DataParallel, in one process with a thread for each GPU, gives the unfused model's results."""
    model, fused = pair(fused_mlp, "fuse_mlps", Blocks(kind).cuda())
    x = torch.randn(8, 32, device="cuda")
    outcomes = []
    for candidate in (torch.nn.DataParallel(fused), model):
        candidate.zero_grad()
        output = candidate(x)
        output.square().mean().backward()
        with torch.no_grad():
            outcomes.append([output.detach(), candidate(x), [p.grad for p in candidate.parameters()]])
    assert_close(*outcomes)
