"""The program of two processes for test_distributed.py: fused models under every kind of parallelism, against one
process.

    RANK=0 WORLD_SIZE=2 python tests/distributed/distributed_cases.py gloo OUT      and the same with RANK=1 beside it

Each writes OUT/RANK.json: for every case its facts, or the traceback.
"""

import copy
import datetime
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "tests/support", "tests/samples"))
import kernels
import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import mixtures
import project
from modules import Gated, PackedGated, Plain
from safety import Blocks, assert_close, fuse, llama, reasons, states

PLANS = {
    Gated: {"gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel},
    Plain: {"fc1": ColwiseParallel, "fc2": RowwiseParallel},
}


class Setting:
    """This process: its device, the mesh of both processes, the kernel, and inputs that all ranks share."""

    def __init__(self, backend, folder):
        self.rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        self.device = torch.device("cuda", self.rank) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(self.device)
        options = {"rank": self.rank, "world_size": world, "timeout": datetime.timedelta(seconds=60)}
        dist.init_process_group(backend, init_method=f"file://{folder}/ranks", **options)
        self.mesh = init_device_mesh(self.device.type, (2,))
        self.fused_mlp = kernels.get_kernel(
            project.repo_id(), version=project.version(), backend=self.device.type, trust_remote_code=True
        )

    def blocks(self, kind):
        torch.manual_seed(0)
        return Blocks(kind).to(self.device)

    def x(self):
        torch.manual_seed(1)
        return torch.randn(4, 7, 32, device=self.device)

    def facts(self, model):
        return {"states": sorted(states(self.fused_mlp, model)), "reasons": sorted(reasons(self.fused_mlp, model))}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(model, x):
    """Output, output without autograd, and gradients of all parameters, all gathered."""
    model.zero_grad()
    output = whole(_tensor(model(x)))
    output.square().mean().backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    with torch.no_grad():
        without = whole(_tensor(model(x)))
    return output.detach(), without, gradients


def _tensor(output):
    return output.logits if hasattr(output, "logits") else output


def operators(model, x):
    """Names of the operators that an inference call runs."""
    model.eval()
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    return " ".join(event.name for event in profile.events())


def wrapped(setting, way, when, model, wrap):
    """The model, fused and made parallel in the order given by `when`."""
    if when == "before":
        return wrap(fuse(setting.fused_mlp, way, model))
    return fuse(setting.fused_mlp, way, wrap(model))


def tensor_parallel(setting, way, when, kind, local):
    """Weights are DTensors; between products the pointwise part is fused, on local shards if layers return those."""

    def wrap(model):
        for mlp in model.mlps:
            plan = {
                name: style(use_local_output=local) if style is ColwiseParallel else style()
                for name, style in PLANS[kind].items()
            }
            parallelize_module(mlp, setting.mesh, plan)
        return model

    x, expected = setting.x(), outcome(setting.blocks(kind), setting.x())
    model = wrapped(setting, way, when, setting.blocks(kind), wrap)
    assert_close(outcome(model, x), expected)
    return setting.facts(model)


def fully_sharded(setting, way, when, kind, unit):
    """FSDP2, sharded by model, by MLP or by projection, gives the results of one process."""

    def wrap(model):
        for mlp in model.mlps:
            if unit == "projection":
                for part in mlp.children():
                    if isinstance(part, nn.Linear):
                        fully_shard(part, mesh=setting.mesh)
            if unit != "model":
                fully_shard(mlp, mesh=setting.mesh)
        return fully_shard(model, mesh=setting.mesh)

    x, expected = setting.x(), outcome(setting.blocks(kind), setting.x())
    model = wrapped(setting, way, when, setting.blocks(kind), wrap)
    assert_close(outcome(model, x), expected)
    whole_op = "gated_mlp" if kind in (Gated, PackedGated) else "fused_mlp"
    if unit != "projection":  # gathered during its call, and then an ordinary module
        assert whole_op in operators(model, x)
    return setting.facts(model)


def fully_sharded_in_bfloat16(setting, way, when):
    """FSDP2 in bfloat16 gives the results of the unfused model under the same policy."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(model):
        for mlp in model.mlps:
            fully_shard(mlp, mesh=setting.mesh, mp_policy=policy)
        return fully_shard(model, mesh=setting.mesh)

    x, expected = setting.x(), outcome(wrap(setting.blocks(Gated)), setting.x())
    model = wrapped(setting, way, when, setting.blocks(Gated), wrap)
    assert_close(outcome(model, x), expected, tolerance=3e-2)
    return setting.facts(model)


def data_parallel(setting, way, when, kind):
    """Under DDP each rank has half of the rows, and the gradients are those of all rows."""
    x = setting.x()
    output, without, gradients = outcome(setting.blocks(kind), x)
    model = setting.blocks(kind)
    ids = [setting.device.index] if setting.device.type == "cuda" else None
    parallel = wrapped(setting, way, when, model, lambda model: DistributedDataParallel(model, device_ids=ids))
    half = x.chunk(2)[setting.rank]
    for call in (parallel, torch.compile(parallel, backend="aot_eager")):
        model.zero_grad()
        result = call(half)
        result.square().mean().backward()
        assert_close(result.detach(), output.chunk(2)[setting.rank])
        assert_close({name: p.grad for name, p in model.named_parameters()}, gradients)
    with torch.no_grad():
        assert_close(parallel(half), without.chunk(2)[setting.rank])
    return setting.facts(model)


def adapted(setting, way, when, sharded):
    """MLPs with PEFT's LoRA train only the adapters, under DDP or under FSDP2 by MLP."""

    def made():
        model = setting.blocks(Gated)
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, target_modules=list(PLANS[Gated]), init_lora_weights=False)
        return peft.inject_adapter_in_model(config, model)

    def wrap(model):
        if not sharded:
            ids = [setting.device.index] if setting.device.type == "cuda" else None
            return DistributedDataParallel(model, device_ids=ids)
        for mlp in model.mlps:
            fully_shard(mlp, mesh=setting.mesh)
        return fully_shard(model, mesh=setting.mesh)

    def trained(model, x):
        output = whole(model(x))
        output.square().mean().backward()
        return output.detach(), [whole(p.grad) for p in model.parameters() if p.requires_grad]

    x, expected = setting.x(), trained(made(), setting.x())
    model = wrapped(setting, way, when, made(), wrap)
    part = x if sharded else x.chunk(2)[setting.rank]
    output, gradients = trained(model, part)
    assert_close(output, expected[0] if sharded else expected[0].chunk(2)[setting.rank])
    assert_close(gradients, expected[1])
    assert "adapted_forward" in operators(model, part)
    return setting.facts(model)


def saved(setting, model):
    """Saves the model in one process, and returns the folder in all."""
    folder = [tempfile.mkdtemp()] if setting.rank == 0 else [None]
    dist.broadcast_object_list(folder)
    if setting.rank == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


def tp_plan(setting, way):
    """A model that transformers loads as shards is fused with its hooks in place."""
    torch.manual_seed(0)
    model, ids = llama(setting.device)
    folder = saved(setting, model)
    expected = outcome(model, ids)
    options = {"tp_plan": "auto", "device_mesh": setting.mesh}
    parallel = transformers.LlamaForCausalLM.from_pretrained(folder, **options)
    unfused = outcome(parallel, ids)
    assert_close(unfused[:2], expected[:2])
    fuse(setting.fused_mlp, way, parallel)
    got = outcome(parallel, ids)
    assert_close(got, unfused)
    for name, gradient in expected[2].items():
        if "mlp" in name and got[2][name].shape == gradient.shape:
            assert_close(got[2][name], gradient)
    return setting.facts(parallel)


def ep_plan(setting):
    """Under transformers' expert parallelism, the registered implementation computes each process's own experts."""
    model = mixtures.build("qwen3_moe").to(setting.device)
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(0)).to(setting.device)
    folder = saved(setting, model)
    options = {"distributed_config": DistributedConfig(tp_size=2, ep_size=2, tp_plan={})}
    setting.fused_mlp.register_experts()
    parallel = type(model).from_pretrained(folder, experts_implementation="fused_mlp", **options)
    assert_close(outcome(parallel, ids)[:2], outcome(model, ids)[:2])
    assert "experts" in operators(parallel, ids)
    assert "original" not in str(setting.fused_mlp.explain(parallel))
    unregistered = type(model).from_pretrained(folder, **options)
    report = str(setting.fused_mlp.fuse_mlps(unregistered))
    assert "experts_implementation" in re.sub(r"\s", "", report)
    assert_close(outcome(unregistered, ids)[:2], outcome(model, ids)[:2])
    return setting.facts(parallel)


# Every two values of any two columns occur together.
TENSOR_PARALLEL = [
    (Gated, "fuse_mlps", "before", True),
    (Gated, "fuse_mlps", "after", False),
    (Gated, "kernelize", "before", False),
    (Gated, "kernelize", "after", True),
    (Plain, "fuse_mlps", "before", False),
    (Plain, "fuse_mlps", "after", True),
    (Plain, "kernelize", "before", True),
    (Plain, "kernelize", "after", False),
]
CASES = {
    **{
        f"tensor parallel, {kind.__name__}, {way} {when}, {'local' if local else 'DTensor'} outputs": (
            tensor_parallel,
            (way, when, kind, local),
        )
        for kind, way, when, local in TENSOR_PARALLEL
    },
    **{
        f"FSDP2, {kind.__name__}, {way} {when}, by {unit}": (fully_sharded, (way, when, kind, unit))
        for kind, way in (
            (Gated, "fuse_mlps"),
            (Gated, "kernelize"),
            (PackedGated, "fuse_mlps"),
            (Plain, "fuse_mlps"),
        )
        for when in ("before", "after")
        for unit in ("model", "MLP", "projection")
    },
    **{f"FSDP2 in bfloat16, {when}": (fully_sharded_in_bfloat16, ("fuse_mlps", when)) for when in ("before", "after")},
    **{
        f"DDP, {kind.__name__}, {way} {when}": (data_parallel, (way, when, kind))
        for kind, way in ((Gated, "fuse_mlps"), (Gated, "kernelize"), (PackedGated, "fuse_mlps"))
        for when in ("before", "after")
    },
    **{
        f"{'FSDP2' if sharded else 'DDP'}, LoRA, {when}": (adapted, ("fuse_mlps", when, sharded))
        for sharded in (False, True)
        for when in ("before", "after")
    },
    **{f"transformers tp_plan, {way}": (tp_plan, (way,)) for way in ("fuse_mlps", "kernelize")},
    "transformers ep_plan": (ep_plan, ()),
}


def refusal(name, backend):
    """The reason why a case cannot run with this backend here, or None."""
    if backend == "gloo" and torch.cuda.is_available():
        if name.startswith("transformers"):
            return "transformers shards over the GPUs wherever there are any"
        if "kernelize" in name:
            return "kernelize takes the CUDA build, for a model on the CPU too, wherever torch has CUDA"
    return None


def main():
    backend, folder = sys.argv[1:]
    setting = Setting(backend, folder)
    results = {}
    for name, (case, arguments) in CASES.items():
        if refusal(name, backend) is not None:
            continue
        torch.compiler.reset()
        try:
            results[name] = case(setting, *copy.copy(arguments))
        except Exception:  # the case's test reports it
            results[name] = traceback.format_exc()
        dist.barrier()
    Path(folder, f"{setting.rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
