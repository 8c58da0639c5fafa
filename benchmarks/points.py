"""Code shared by all benchmarks: loading the package, options of a run, interleaved points, output.

A point that fails, or a provider that does not run at one, is recorded with the reason; the others continue.
"""

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
import project

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())

import kernels
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import measure

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TIMES = {
    "kernel_us": "GPU us",
    "kernels": "kernels",
    "graph_us": "in graphs",
    "wall_us": "wall us",
    "thread_us": "us of a thread",
    "forward_us": "host, forward",
    "backward_us": "host, backward",
    "saved": "saved MiB",
    "peak": "peak MiB",
}


def package(backend: str = DEVICE):
    return kernels.get_kernel(project.repo_id(), version=project.version(), backend=backend, trust_remote_code=True)


def parser(words: str, name: str, stored: bool = True, **defaults: float | None) -> argparse.ArgumentParser:
    """The options of a benchmark: those for which it has a default, and the output path of its run."""
    made = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, kind, says in (
        ("rounds", int, "turns of each"),
        ("seconds", float, "length of a turn"),
        ("minutes", float, "of the whole run; 0 for as long as it takes"),
    ):
        if option in defaults:
            made.add_argument(f"--{option}", type=kind, default=defaults[option], help=says)
    if stored:
        made.add_argument("--from", dest="source", type=Path, help="show what such a run has written; measure nothing")
    made.add_argument("--out", type=Path, default=Path("build") / name)
    return made


def found_by(run: Callable[[argparse.Namespace], dict], given: argparse.Namespace) -> dict:
    """The results of a run, or of a stored one."""
    return json.loads(given.source.read_text()) if given.source else run(given)


def write(found: dict, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


def words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def alike(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and bool((found - expected).float().norm() <= 3e-2 * expected.float().norm())


@contextlib.contextmanager
def noting(left: dict[str, str], name: str) -> Iterator[None]:
    """Records an error raised inside as the reason why one provider is left out."""
    try:
        yield
    except Exception as error:
        left[name] = words(error)


class Clock:
    """Divides the rest of a run's time among its points. It only refuses starts: a started provider finishes."""

    def __init__(self, minutes: float, points: int) -> None:
        self.end = time.monotonic() + 60 * minutes if minutes > 0 else float("inf")
        self.points = points

    def next_point(self) -> None:
        """Starts a point: half of its share may be spent on starting its providers; the rest is for their turns."""
        now = time.monotonic()
        share = max(0.0, self.end - now) / self.points
        self.last_start, self.point_end = now + share / 2, now + share
        self.points -= 1

    def left_to_start(self) -> float:
        """Seconds that remain to start a provider; at least one for a provider that was admitted."""
        return max(1.0, self.last_start - time.monotonic())

    def refusal(self) -> str | None:
        return None if time.monotonic() < self.last_start else "no time left"

    def rounds(self, seconds: float, most: int) -> int:
        """The number of rounds of that length that fit into the time; at least two."""
        return int(max(2, min(most, (self.point_end - time.monotonic()) / seconds)))


def collect(
    found: dict, points: Iterable, label: Callable[..., dict], figures: Callable[..., dict], clock: Clock, out: Path
) -> dict:
    """Adds each point's result and writes the results after each, so that a failing point does not lose the others."""
    with tqdm(points, disable=None) as progress:
        for point in progress:
            progress.set_description(", ".join(map(str, point)))
            clock.next_point()
            result = {**label(*point), "providers": {}, "left": {}}
            reason = clock.refusal()
            try:
                result |= {"left": {"all": reason}} if reason else figures(*point)
            except Exception as error:
                result["left"] = {"all": words(error)}
            found["results"].append(result)
            tidy()
            write(found, out)
    return found


def tidy() -> None:
    gc.collect()
    torch._dynamo.reset()
    if ON_GPU:
        torch.cuda.empty_cache()


def compared(calls: dict, compare: Callable[[dict], dict], left: dict[str, str]) -> dict:
    """The figures of a comparison. If it fails, each call is tried alone, and failing ones are left out."""
    try:
        return compare(calls)
    except Exception:
        for name, call in calls.items():
            with noting(left, name):
                compare({name: call})
        there = {name: call for name, call in calls.items() if name not in left}
        if len(there) == len(calls):
            raise
        return compare(there) if there else {}


def timed(steps: dict[Hashable, Callable[[], object]], clock: Clock, given) -> dict[Hashable, dict[str, float]]:
    """Each step's wall and CPU time in turns of `given.seconds`, and on a GPU its kernels' in turns of one step."""

    def iterations(step: Callable[[], object]) -> int:
        return max(1, min(100, int(given.seconds * 1e6 / measure.wall_microseconds(step, 1))))

    def turn(step: Callable[[], object], iterations: int) -> dict[str, float]:
        taken = {"wall_us": measure.wall_microseconds(step, iterations)}
        return taken | {"cpu_us": measure.cpu_microseconds(step, min(10, iterations))} if ON_GPU else taken

    turns = {name: partial(turn, step, iterations(step)) for name, step in steps.items()}
    start = time.monotonic()
    measure.in_turns(turns, 1)  # warms up, and measures the length of a round
    of_a_round = time.monotonic() - start
    rounds = clock.rounds(of_a_round * (2 if ON_GPU else 1), given.rounds)
    found = measure.in_turns(turns, rounds)
    if ON_GPU:
        single = int(max(3, min(60, rounds * of_a_round / sum(of["wall_us"] * 1e-6 for of in found.values()))))
        of_kernels = measure.gpu_microseconds_call_by_call(steps, single)
        found = {name: of_kernels[name] | of for name, of in found.items()}
    return found


def with_memory(figures: dict, memory: dict) -> dict:
    """The figures of each way, with its saved bytes and its peak."""
    for name, (saved, peak) in memory.items():
        figures[name] |= {"saved": saved / 2**20, "peak": peak / 2**20}
    return figures


def where(found: dict) -> str:
    return found["machine"].get("gpu") or found["machine"]["cpu"]


def show(table: Table, width: int = 140) -> None:
    Console(width=None if sys.stdout.isatty() else width).print(table)


def print_table(found: dict, what: str, title: Callable[[dict], str]) -> None:
    """Prints every provider at every point, with its ratios to eager, or the reason why it is left out."""
    table = Table(title=f"{where(found)}: {what} (to eager)")
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
    show(table)
