"""Calls every op of the package repeatedly while the GPU has other work, and expects the same bits each time.

    python tests/fuzz/fuzz_races.py --repeats 50 --processes 5 --seconds 120

The calls are those of sanitizer_cases.py, which reach every kernel, followed by random ones.

A kernel that reads memory before it is written, or overwrites memory still being read, is nearly always right on an
idle GPU: concurrent work shifts its reads and writes.
"""

import argparse
import functools
import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
import sanitizer_cases

BUSY_BYTES = 1 << 28
PADDED = "experts_training"  # ops that keep tensors with rows that are never written
GATE_UP = 2  # the index of such a tensor among a backward's operands


class Repeated(TorchDispatchMode):
    """Calls each op of the package `repeats` more times, concurrently with copies on its own stream."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats, self.calls = repeats, 0
        self.stream = torch.cuda.Stream()
        self.busy = torch.empty(2, BUSY_BYTES, dtype=torch.uint8, device="cuda")

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = args, kwargs or {}
        if not str(op.namespace).startswith("_fused_mlp") or torch.cuda.is_current_stream_capturing():
            return op(*given[0], **given[1])
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        offset = generator.get_offset()
        before = tree_map(copied, given) if op._schema.is_mutable else given
        result = op(*given[0], **given[1])
        wanted, after = leaves(op, given, result), generator.get_offset()
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        with torch.cuda.stream(self.stream):
            for _ in range(self.repeats):
                self.busy[0].copy_(self.busy[1])
        for _ in range(self.repeats):
            generator.set_offset(offset)
            again = tree_map(copied, before) if op._schema.is_mutable else given
            for one, other in zip(wanted, leaves(op, again, op(*again[0], **again[1])), strict=True):
                differing += differs(one, other)
        generator.set_offset(after)
        self.calls += self.repeats
        if count := differing.item():
            shapes = [list(leaf.shape) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            raise AssertionError(f"{op}: {count} results of {self.repeats} calls have other bits; operands {shapes}")
        return result


def copied(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def leaves(op, given: tuple, result) -> list[torch.Tensor]:
    """Returns an op's results without those that it leaves undefined or overwrites."""
    if PADDED in op._schema.name:  # a forward's result, or a backward's gradients
        forward = op._schema.name.endswith("forward")
        result = result[0] if forward else [grad for grad in result if len(grad) != len(given[0][GATE_UP])]
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]


def differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns 1 if any bit differs."""
    one, other = (torch.view_as_real(each) if each.is_complex() else each for each in (one, other))
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (one.view(kinds[one.element_size()]) != other.view(kinds[one.element_size()])).any()


def at_random(fused_mlp, seed: int) -> None:
    """Calls a random function, dense or quantised, recorded or not, with rows and features that may not fill tiles."""
    draw = random.Random(seed)
    rows, experts = draw.choice((1, 7, 16, 40, 64, 129, 300, 700, 1500)), draw.choice((2, 5, 8))
    width, hidden, outputs = (draw.choice((8, 8, 32, 64)) * draw.randint(1, 24) for _ in range(3))
    dtype, function = draw.choice((torch.bfloat16, torch.float16)), draw.choice(("mlp", "gated_mlp", "experts_mlp"))
    is_mixture = function == "experts_mlp"
    kind = draw.choice((None, "fp8", "mxfp4") if is_mixture else (None, None, *sanitizer_cases.QUANTIZED))
    if kind is not None:  # a product's inputs are whole blocks; stores differ for outputs that fill no tile
        block = 64 if is_mixture else 128
        width, hidden = (-(-size // block) * block for size in (width, hidden))
        outputs = outputs if is_mixture else -(-outputs // block) * block
    x = torch.randn(rows, width, device="cuda").to(dtype)
    print(f"{seed}: {function}, {rows}, {width}, {hidden}, {outputs}, {dtype}, {kind}", flush=True)
    if is_mixture:
        index = torch.rand(rows, experts, device="cuda").topk(2).indices
        routed = index, torch.rand(rows, 2, device="cuda")

        def made(*size):
            if kind in ("fp8", "mxfp4"):
                return sanitizer_cases.quantized_stack(fused_mlp, kind, *size)
            return torch.randn(size, device="cuda").to(dtype)

        weights = made(experts, 2 * hidden, width), made(experts, outputs, hidden)
        call = functools.partial(fused_mlp.experts_mlp, x, *routed, *weights)
    else:

        def made(*size):
            if kind in sanitizer_cases.QUANTIZED:
                return sanitizer_cases.quantized_weight(fused_mlp, kind, *size)
            return torch.randn(size, device="cuda").to(dtype)

        sizes = [(hidden, width)] * (2 if function == "gated_mlp" else 1) + [(outputs, hidden)]
        weights = [made(*size) for size in sizes]
        call = functools.partial(getattr(fused_mlp, function), x, *weights, activation="silu")
    if draw.random() < 0.5:
        with torch.no_grad():
            call()
    else:
        dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
        leaves = [leaf.requires_grad_() for leaf in (x, *dense)]
        result = call()
        torch.autograd.grad(result, leaves, torch.ones_like(result))
    torch.cuda.synchronize()


def run(arguments: argparse.Namespace) -> None:
    begin = time.monotonic()
    with Repeated(arguments.repeats) as repeated:
        fused_mlp = sanitizer_cases.run("races")
        seeds = itertools.count(random.randrange(1 << 30))
        while time.monotonic() - begin < arguments.seconds:
            at_random(fused_mlp, next(seeds))
    print(f"{repeated.calls} calls of ops, all with the same bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="of each op (default: 50)")
    parser.add_argument("--processes", type=int, default=5, help="that share the GPU (default: 5)")
    parser.add_argument("--seconds", type=float, default=120, help="until no more calls are drawn (default: 120)")
    arguments = parser.parse_args()
    if arguments.processes == 1:
        return run(arguments)
    command = [sys.executable, __file__, *sys.argv[1:], "--processes=1"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(arguments.processes)
    ]
    outputs = [process.communicate()[0].splitlines() for process in started]
    for process, output in zip(started, outputs, strict=True):
        print("\n".join(output[-1:] if process.returncode == 0 else output[-12:]))
    if any(process.returncode for process in started):
        sys.exit("an op had other bits, or failed")


if __name__ == "__main__":
    main()
