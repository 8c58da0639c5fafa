"""Forward and backward of one gated MLP against its peers, and whole steps of two models: time, and memory.

    python benchmarks/training/training.py                     all points of this machine's list, in 8 minutes at most
    python benchmarks/training/training.py --shapes 1024,1024,4096 --models --providers eager compile ours
    python benchmarks/training/training.py --steps llama-1b    whole steps by width, Liger and torch.compile beside ours
    python benchmarks/training/training.py --from build/training.json  show what such a run has written; measure nothing

All providers of a point take turns in one process, and the medians count: of turns of many steps for the wall time, of
single steps in random order for the GPU's, since large products make the clock vary by more than providers do. "Saved"
is what a forward leaves for the backward beside its result, "peak" the most that both allocate. `gemms` are the six
products alone, which give no answer. `ours-sm90`, by name only, forces all GEMMs of training for Hopper GPUs, chosen or
not. A step of a model has its optimizer in it; fresh instances of each variant take turns. What found no time left, or
does not run here, is named with the reason. Writes <out>.json, and prints a table.
"""

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))
import project

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())

import kernels
import torch
import training_models
import training_steps
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
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

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
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
TIMES = {
    "kernel_us": "GPU us",
    "kernels": "kernels",
    "graph_us": "in graphs",
    "wall_us": "wall us",
    "thread_us": "us of a thread",
    "saved": "saved MiB",
    "peak": "peak MiB",
}


class Clock:
    """Shares out what is left of a run's time. Only a start is refused: what has begun is finished."""

    def __init__(self, minutes: float, points: int) -> None:
        self.end = time.monotonic() + 60 * minutes if minutes > 0 else float("inf")
        self.points = points

    def next_point(self) -> None:
        """Half of a point's share may be spent on starting its providers; the rest is for their turns."""
        now = time.monotonic()
        share = max(0.0, self.end - now) / self.points
        self.last_start, self.point_end = now + share / 2, now + share
        self.points -= 1

    def left_to_start(self) -> float:
        """Seconds in which to start a provider. One that was let in has one at least."""
        return max(1.0, self.last_start - time.monotonic())

    def refusal(self) -> str | None:
        return None if time.monotonic() < self.last_start else "no time left"

    def rounds(self, seconds: float, most: int) -> int:
        """The number of rounds of that length that there is time for; two at least."""
        return int(max(2, min(most, (self.point_end - time.monotonic()) / seconds)))


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
        except Exception as error:  # a peer that does not run here is left out, with its words
            reason = words(error)
        if reason is not None:
            left[name] = reason
            forget()
    del expected
    forget()
    found = timed(steps, clock, given)
    for name, (saved, peak) in memory.items():
        found[name] |= {"saved": saved / 2**20, "peak": peak / 2**20}
    return {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "providers": found, "left": left}


def timed(steps: dict[Hashable, Callable[[], object]], clock: Clock, given) -> dict[Hashable, dict[str, float]]:
    """Each step's wall and CPU time in turns of `given.seconds`, and on a GPU its kernels' in turns of one step."""

    def iterations(step: Callable[[], object]) -> int:
        return max(1, min(100, int(given.seconds * 1e6 / measure.wall_microseconds(step, 1))))

    def turn(step: Callable[[], object], iterations: int) -> dict[str, float]:
        taken = {"wall_us": measure.wall_microseconds(step, iterations)}
        return taken | {"cpu_us": measure.cpu_microseconds(step, min(10, iterations))} if ON_GPU else taken

    turns = {name: partial(turn, step, iterations(step)) for name, step in steps.items()}
    start = time.monotonic()
    measure.in_turns(turns, 1)  # warms up, and tells how long a round is
    of_a_round = time.monotonic() - start
    rounds = clock.rounds(of_a_round * (2 if ON_GPU else 1), given.rounds)
    found = measure.in_turns(turns, rounds)
    if ON_GPU:
        single = int(max(3, min(60, rounds * of_a_round / sum(of["wall_us"] * 1e-6 for of in found.values()))))
        kernels = measure.gpu_microseconds_call_by_call(steps, single)
        found = {name: kernels[name] | of for name, of in found.items()}
    return found


def patience(name: str, clock: Clock) -> contextlib.AbstractContextManager:
    """Within this, a provider starts. Only one that tries kernels is stopped when its time is over.

    An exception in the middle of a compilation by Dynamo would make every later call of the process fail.
    """
    return at_most(clock.left_to_start()) if name in AUTOTUNED else contextlib.nullcontext()


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer."""

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


def words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def alike(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and bool((found - expected).float().norm() <= 3e-2 * expected.float().norm())


def of_shape(shape: tuple[int, int, int], dtype: torch.dtype, fused_mlp, clock: Clock, given) -> dict:
    try:
        return figures(shape, dtype, fused_mlp, clock, given)
    except Exception as error:  # likewise: the largest shapes may not fit
        found = {"shape": shape, "dtype": str(dtype).removeprefix("torch.")}
        return found | {"providers": {}, "left": {"all": words(error)}}


def of_model(name: str, dtype: torch.dtype, fused_mlp, clock: Clock, given) -> dict:
    reason = clock.refusal()
    if reason is None:
        try:
            take_turns = partial(timed, clock=clock, given=given)
            return training_models.figures(name, dtype, fused_mlp, given.copies, take_turns)
        except Exception as error:  # the points that are there already are worth more than one that is not
            reason = words(error)
    return {"model": name, "shape": [], "dtype": str(dtype), "providers": {}, "left": {"all": reason}}


def of_steps(name: str, dtype: torch.dtype, fused_mlp, clock: Clock, given) -> dict:
    take_turns = partial(timed, clock=clock, given=given)
    return training_steps.figures(name, dtype, fused_mlp, given.copies, given.variants, take_turns)


def run(given) -> dict:
    fused_mlp = kernels.get_kernel(project.repo_id(), version=project.version(), backend=DEVICE, trust_remote_code=True)
    shapes = SHAPES[DEVICE] if given.shapes is None else given.shapes
    found = {"machine": measure.machine(), "activation": given.activation, "results": []}
    of_dtype = given.steps or (*shapes[:4], *given.models, *shapes[4:])
    points = [(dtype, point) for dtype in given.dtypes for point in of_dtype]
    clock = Clock(given.minutes, len(points))
    with tqdm(points, disable=None) as progress:
        for dtype, point in progress:
            progress.set_description(f"{point}, {dtype}")
            clock.next_point()
            measured = of_steps if given.steps else of_model if isinstance(point, str) else of_shape
            found["results"].append(measured(point, getattr(torch, dtype), fused_mlp, clock, given))
            gc.collect()
            torch._dynamo.reset()
            if ON_GPU:
                torch.cuda.empty_cache()
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def title(result: dict) -> str:
    numbers = (", " if "model" not in result else " x ").join(map(str, result["shape"]))
    return f"{result.get('model', '')} {numbers} {result['dtype']}".strip()


def print_table(found: dict, what: str = "forward and backward", title: Callable[[dict], str] = title) -> None:
    table = Table(title=f"{found['machine'].get('gpu') or found['machine']['cpu']}: {what} (to eager)")
    table.add_column("M, D, H, or a model's step")
    table.add_column("provider", no_wrap=True)
    columns = [key for key in TIMES if any(key in of for r in found["results"] for of in r["providers"].values())]
    for key in columns:
        table.add_column(TIMES[key], justify="right", no_wrap=True)
    for result in found["results"]:
        base = result["providers"].get("eager", {})
        titles = iter([title(result)])
        for name, of in result["providers"].items():
            cells = []
            for key in columns:
                ratio = f" ({of[key] / base[key]:.2f})" if key in of and base.get(key) else ""
                cells.append(f"{of[key]:.{0 if of[key] >= 100 else 2}f}{ratio}" if key in of else "")
            table.add_row(next(titles, ""), name, *cells)
        for name, reason in result["left"].items():
            table.add_row(next(titles, ""), name, reason)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", type=lambda text: tuple(map(int, text.split(","))), help="M,D,H each")
    parser.add_argument(
        "--models", nargs="*", choices=training_models.MODELS, default=list(training_models.MODELS), help="whole steps"
    )
    parser.add_argument("--steps", nargs="*", choices=training_steps.STEPS, help="whole steps by width, and no others")
    parser.add_argument("--variants", nargs="+", choices=training_steps.VARIANTS, default=training_steps.VARIANTS)
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(DEFAULT))
    parser.add_argument("--activation", choices=ACTIVATIONS, default="silu")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32", "float16"], default=["bfloat16"])
    parser.add_argument("--copies", type=int, default=2, help="fresh instances of a model's variants")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every provider")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn")
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run; 0 for as long as it takes")
    parser.add_argument("--from", dest="source", type=Path, help="show what such a run has written; measure nothing")
    parser.add_argument("--out", type=Path, default=Path("build/training"))
    given = parser.parse_args()
    given.steps = list(training_steps.STEPS) if given.steps == [] else given.steps
    found = json.loads(given.source.read_text()) if given.source else run(given)
    print_table(found)


if __name__ == "__main__":
    main()
