"""Fuses whole transformers models, changes a random part of each, and compares further calls with the unfused models.

    python tests/fuzz/fuzz_changes.py --cases 1000

A model is called several times after a change, since a fused module that missed is retried. A failed case prints its
seed; `--seed SEED --cases 1` runs it again.
"""

import argparse
import copy
import functools
import random
import sys
import types
from pathlib import Path

import torch
from accelerate import hooks
from torch import nn
from torch.nn.utils import parametrize, prune

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "tests/support", "tests/samples"))
import machine
import mixtures
import project
import tiny_models

CALLS = 4  # after a change: a module may be retried at its first, second and fourth miss


def doubled(found):
    if isinstance(found, tuple):
        return tuple(map(doubled, found))
    return found * 2 if isinstance(found, torch.Tensor) and found.is_floating_point() else found


def bound(part):
    part.forward = types.MethodType(lambda self, *given: doubled(type(self).forward(self, *given)), part)


def partial(part):
    """Replaces a forward as accelerate does."""
    part.forward = functools.partial(lambda old, *given, **named: doubled(old(*given, **named)), part.forward)


def on_devices(part):
    """Hooks a part and all inside it as a device map does."""
    device = next((each.device for each in part.parameters()), None)
    for each in part.modules():
        hooks.add_hook_to_module(each, hooks.AlignDevicesHook(device))


def on_devices_and_doubled(part):
    on_devices(part)
    part._hf_hook.post_forward = lambda module, found: doubled(found)


def wrapped(part):
    forward = part.forward
    part.forward = functools.wraps(forward)(lambda *given, **named: doubled(forward(*given, **named)))


def hooked(part):
    part.register_forward_hook(lambda module, given, found: doubled(found))


def hooked_before(part):
    part.register_forward_pre_hook(lambda module, given: doubled(given))


def of_a_subclass(name):
    def change(part):
        old = getattr(type(part), name)
        part.__class__ = type("Doubled", (type(part),), {name: lambda *given, **named: doubled(old(*given, **named))})

    return change


def each_parameter(change):
    def changed(part):
        for name, parameter in list(part.named_parameters(recurse=False)):
            change(part, name, parameter)

    return changed


def no_parameter(part, name, parameter):
    delattr(part, name)
    setattr(part, name, parameter.detach() * 2)


def floats(part):
    for name, value in list(vars(part).items()):
        if type(value) is float and "dropout" not in name:
            setattr(part, name, 3 * value + 0.01)


def without_parameters(part):
    for name, child in part.named_children():
        if not list(child.parameters()):
            return setattr(part, name, nn.Tanh())


def held_function(part):
    """Replaces the function that an activation holds, as transformers' GELUs do."""
    if callable(vars(part).get("act")):
        part.act = torch.tanh


def parametrized(part):
    name, _ = next(part.named_parameters(recurse=False), (None, None))
    if name is not None:
        parametrize.register_parametrization(part, name, nn.Softplus())


def pruned(part):
    name, _ = next(part.named_parameters(recurse=False), (None, None))
    if name is not None:
        prune.l1_unstructured(part, name, amount=0.5)


CHANGES = {
    "method": bound,
    "partial": partial,
    "wrapper": wrapped,
    "device map": on_devices,
    "hook of a device map": on_devices_and_doubled,
    "hook": hooked,
    "hook before": hooked_before,
    "forward of a subclass": of_a_subclass("forward"),
    "call of a subclass": of_a_subclass("__call__"),
    "values": each_parameter(lambda part, name, parameter: parameter.data.mul_(2)),
    "data": each_parameter(lambda part, name, parameter: setattr(parameter, "data", parameter.data * 2)),
    "parameters": each_parameter(lambda part, name, parameter: setattr(part, name, nn.Parameter(parameter * 2))),
    "no parameters": each_parameter(no_parameter),
    "what hides parameters": each_parameter(lambda part, name, parameter: part.__dict__.update({name: parameter * 2})),
    "who is trained": each_parameter(lambda part, name, parameter: parameter.requires_grad_(False)),
    "floats": floats,
    "a child": without_parameters,
    "a function": held_function,
    "parametrization": parametrized,
    "pruning": pruned,
    "training mode": lambda part: setattr(part, "training", not part.training),
}


def built(draw: random.Random, device: torch.device):
    """Returns the name of a tiny model, the model without dropout, and its inputs."""
    if draw.random() < 0.5:
        name = draw.choice(sorted(mixtures.MODELS))
        model, given = mixtures.build(name).to(device), {"input_ids": torch.randint(3, 60, (2, 9), device=device)}
    else:
        name = draw.choice(sorted(tiny_models.MODELS))
        model, given = tiny_models.build(name, device)
    for module in model.modules():
        vars(module).update({name: 0.0 for name in ("p", "dropout", "attention_dropout") if name in vars(module)})
    return name, model, given


def result(model, given, records: bool):
    """Returns the first output, or the error's class."""
    try:
        with torch.set_grad_enabled(records):
            return model(**given)[0].detach()
    except Exception as error:
        return type(error)


def check(fused_mlp, seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name, model, given = built(draw, device)
    spread = draw.choice((None, None, "before", "after"))
    if spread == "before":
        on_devices(model)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    if spread == "after":
        on_devices(model)
        on_devices(fused)
    records = draw.random() < 0.5
    for _ in range(draw.choice((0, 1, 3))):
        result(fused, given, records)
    done = []
    for _ in range(draw.choice((1, 1, 2))):
        path = draw.choice([path for path, _ in model.named_modules() if "." in path])
        change = draw.choice(sorted(CHANGES))
        done.append((path, change))
        for each in (model, fused):
            CHANGES[change](each.get_submodule(path))
        wanted = result(model, given, records)
        for call in range(CALLS):
            found = result(fused, given, records)
            where = f"{name}, hooked {spread}, with {done}, call {call}"
            if not isinstance(wanted, torch.Tensor):
                assert found is wanted, f"{where}: {found}, unfused {wanted}"
            elif wanted.isfinite().all():
                assert isinstance(found, torch.Tensor), f"{where}: {found}"
                error, largest = (found - wanted).abs().max(), wanted.abs().max()
                assert error <= 3e-4 * largest + 1e-5, f"{where}: error {error:.1e} of {largest:.1e}"
        fused_mlp.explain(fused)


def main() -> int:
    from kernels import get_kernel
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the first case")
    options = parser.parse_args()
    device = torch.device(machine.device_type())
    fused_mlp = get_kernel(project.repo_id(), version=project.version(), backend=device.type)
    failures = 0
    for seed in tqdm(range(options.seed, options.seed + options.cases), unit="case", disable=None):
        try:
            check(fused_mlp, seed, device)
        except Exception as error:
            failures += 1
            print(f"\nseed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"{options.cases} cases, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
