"""Forward and backward of one gated MLP against its peers, and whole steps of two models: time and memory.

    python benchmarks/training/training.py                     all points of this machine's list, in 8 minutes at most
    python benchmarks/training/training.py --shapes 1024,1024,4096 --models --providers eager compile ours
    python benchmarks/training/training.py --steps llama-1b    whole steps by width, with Liger and torch.compile
    python benchmarks/training/training.py --blocks            norm, MLP and sum, with the host's time of each block
    python benchmarks/training/training.py --from build/training.json  show the results of such a run; measure nothing

All providers of a point run interleaved in one process and are compared by medians: over turns of many steps for the
wall time, over single steps in random order for the GPU time, since large GEMMs make the clock vary by more than the
providers differ. "Saved" is the memory that a forward keeps for the backward besides its result, "peak" the most that
both allocate. `gemms` are the six GEMMs alone, without a result. `ours-sm90`, by name only, forces all training GEMMs
to the Hopper kernels, chosen or not. A step of a model includes its optimizer; fresh instances of each variant run
interleaved. Cases that do not run here or do not fit the time limit are listed with the reason. Writes <out>.json, and
prints a table.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import points
import torch
import training_blocks
import training_models
import training_steps
from points import DEVICE, Clock, alike, timed, words
from torch import Tensor
from training_providers import (
    ACTIVATIONS,
    AUTOTUNED,
    DEFAULT,
    PROVIDERS,
    Forward,
    GatedMLP,
    kernels_of,
    makers,
    six_gemms,
    unavailable,
)

import measure

SHAPES = {
    "cuda": [
        (8192, 768, 3072),
        (1024, 1024, 4096),
        (8192, 2048, 16384),
        (16384, 4096, 14336),
        (131072, 4096, 14336),
        (1024, 4096, 14336),
        (4096, 4096, 14336),
        (65536, 4096, 14336),
    ],
    "cpu": [(16, 384, 1536), (128, 768, 3072), (1024, 768, 3072)],
}


def figures(shape: tuple[int, int, int], dtype: torch.dtype, fused_mlp, clock: Clock, given) -> dict:
    rows, width, hidden = shape
    torch.manual_seed(0)
    with torch.device(DEVICE):
        mlp = GatedMLP(width, hidden, given.activation).to(dtype)
        x, grad = torch.randn(rows, width, dtype=dtype).requires_grad_(), torch.randn(rows, width, dtype=dtype)
    leaves = [x, *(part.weight for part in mlp.children())]

    def forget() -> None:
        for leaf in (x, *mlp.parameters()):
            leaf.grad = None

    def backward(result: Tensor) -> None:
        result.backward(grad)

    def step(forward: Forward) -> None:
        forget()
        backward(forward(x))

    steps, memory, left = {}, {}, {}
    step(mlp)
    expected = [leaf.grad for leaf in leaves]
    for name in given.providers:
        reason = unavailable(name, given.activation) or clock.refusal()
        if reason is None and name == "gemms":
            steps[name] = six_gemms(mlp, x)
            continue
        try:
            if reason is None:
                forward = makers(fused_mlp)[name](mlp)
                with kernels_of(name, fused_mlp), patience(name, clock):
                    step(forward)
                for leaf, other in zip(leaves, expected, strict=True):  # QuACK has gate and up in a weight of its own
                    if not (leaf.grad is None and name.startswith("quack")) and not alike(leaf.grad, other):
                        raise RuntimeError("its gradients are not eager's")
                forget()
                with kernels_of(name, fused_mlp):
                    memory[name] = measure.saved_and_peak(lambda forward=forward: forward(x), backward)

                def call(name=name, forward=forward) -> None:
                    with kernels_of(name, fused_mlp):
                        step(forward)

                steps[name] = call
        except Exception as error:  # a peer that does not run here is left out, with the error as reason
            reason = words(error)
        if reason is not None:
            left[name] = reason
            forget()
    del expected
    forget()
    return {"providers": points.with_memory(timed(steps, clock, given), memory), "left": left}


def patience(name: str, clock: Clock) -> contextlib.AbstractContextManager:
    """Limits a provider's start, if it is one that autotunes.

    Other providers are not interrupted: an exception during a compilation by Dynamo makes all later calls of the
    process fail.
    """
    return at_most(clock.left_to_start()) if name in AUTOTUNED else contextlib.nullcontext()


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError if the block takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready within {seconds:.0f} s")

    if seconds == float("inf") or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def of_point(dtype: str, point: tuple | str, fused_mlp, clock: Clock, given) -> dict:
    made = getattr(torch, dtype)
    take_turns = partial(timed, clock=clock, given=given)
    if given.blocks:
        return training_blocks.figures(point, made, fused_mlp, training_blocks.VARIANTS, take_turns)
    if given.steps:
        return training_steps.figures(point, made, fused_mlp, given.copies, given.variants, take_turns)
    if isinstance(point, str):
        return training_models.figures(point, made, fused_mlp, given.copies, take_turns)
    return figures(point, made, fused_mlp, clock, given)


def label(dtype: str, point: tuple | str) -> dict:
    of = {"model": point, "shape": []} if isinstance(point, str) else {"shape": point}
    return {**of, "dtype": dtype}


def run(given) -> dict:
    shapes = SHAPES[DEVICE] if given.shapes is None else given.shapes
    found = {"machine": measure.machine(), "activation": given.activation, "results": []}
    of_dtype = given.blocks or given.steps or (*shapes[:4], *given.models, *shapes[4:])
    todo = [(dtype, point) for dtype in given.dtypes for point in of_dtype]
    clock = Clock(given.minutes, len(todo))
    measured = partial(of_point, fused_mlp=points.package(), clock=clock, given=given)
    return points.collect(found, todo, label, measured, clock, given.out)


def title(result: dict) -> str:
    numbers = (", " if "model" not in result else " x ").join(map(str, result["shape"]))
    return f"{result.get('model', '')} {numbers} {result['dtype']}".strip()


def main():
    parser = points.parser(__doc__, "training", rounds=5, seconds=0.1, minutes=8.0)
    parser.add_argument("--shapes", nargs="*", type=lambda text: tuple(map(int, text.split(","))), help="M,D,H each")
    parser.add_argument(
        "--models", nargs="*", choices=training_models.MODELS, default=list(training_models.MODELS), help="whole steps"
    )
    parser.add_argument("--steps", nargs="*", choices=training_steps.STEPS, help="whole steps by width, and no others")
    parser.add_argument("--blocks", action="store_true", help="blocks of norm, MLP and sum, and nothing else")
    parser.add_argument("--variants", nargs="+", choices=training_steps.VARIANTS, default=training_steps.VARIANTS)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(DEFAULT))
    parser.add_argument("--activation", choices=ACTIVATIONS, default="silu")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32", "float16"], default=["bfloat16"])
    parser.add_argument("--copies", type=int, default=2, help="fresh instances of a model's variants")
    given = parser.parse_args()
    given.steps = list(training_steps.STEPS) if given.steps == [] else given.steps
    if given.steps:
        given.seconds = max(given.seconds, 0.5)  # a few steps run at the clock that the previous variant left
    given.blocks = training_blocks.SHAPES[DEVICE] if given.blocks else []
    points.print_table(points.found_by(run, given), "forward and backward", title)


if __name__ == "__main__":
    main()
