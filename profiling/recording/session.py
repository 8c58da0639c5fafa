"""One run: prints the expectations, records, then marks each expectation as held or not."""

import argparse
from collections.abc import Callable
from pathlib import Path

import environment  # noqa: F401
import figures
import recorder
import setups
import torch
from results import kernel_rows, of_eager
from rich.console import Console
from rich.table import Table
from setups import Setup, Workload
from torch import Tensor
from tqdm import tqdm

import measure

console = Console(highlight=False)

ROUNDS, TURN_US = 7, 50_000.0


def arguments(description: str, shape: dict[str, int]) -> argparse.ArgumentParser:
    """The parser of a script: its shape, and the folder for the traces."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=_positive, default=default, help=" ")
    parser.add_argument("--out", type=Path, default=Path("build/profile"), help="folder for the traces")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def run(workload: Workload, out: Path) -> list[dict]:
    """Records all set-ups of a workload, then times them interleaved, prints progress, and returns their figures."""
    found = []
    eager = None
    shape = ", ".join(f"{name} {size}" for name, size in workload.shape.items())
    console.rule(f"{workload.title}, {shape}, {str(setups.DTYPE).removeprefix('torch.')} on {setups.device()}")
    for setup in tqdm(workload.setups, desc="profiling", leave=False, disable=None):
        _tell_expectations(setup)
        trace = out / f"{workload.key}-{setup.key}.json"
        torch._dynamo.reset()
        recording = recorder.record(setup.call, workload.x, workload.of_other_shape, trace)
        eager = eager or recording
        found.append(figures.of_setup(setup, workload, recording, eager, trace))
        tell(found[-1])
        console.print(f"trace: {trace} (https://ui.perfetto.dev opens it)", style="dim", soft_wrap=True)
    for setup, times in zip(found, wall_times(workload), strict=True):
        setup.update(times)
    console.print(_walls(found))
    return found


@torch.no_grad()
def wall_times(workload: Workload) -> list[dict[str, float]]:
    """`wall_us` and its spread for each set-up, without the profiler, interleaved so that a slowdown affects all."""

    def turn(call: Callable[[Tensor], Tensor]) -> Callable[[], dict[str, float]]:
        iterations = measure.iterations_within(lambda: call(workload.x), TURN_US)
        return lambda: {"wall_us": measure.wall_microseconds(lambda: call(workload.x), iterations)}

    figures_of = measure.in_turns({setup.key: turn(setup.call) for setup in workload.setups}, ROUNDS)
    return [figures_of[setup.key] for setup in workload.setups]


def _walls(found: list[dict]) -> Table:
    table = Table(title=f"a call without the profiler: medians of {ROUNDS} turns, and their spread")
    table.add_column("set-up")
    for column in ("us", "spread", "of eager"):
        table.add_column(column, justify="right")
    for setup in found:
        ratio = of_eager(setup, {"setups": found, "noisy_above": measure.timing.NOISY})
        table.add_row(setup["title"], f"{setup['wall_us']:.1f}", f"{setup['wall_us_spread']:.0%}", ratio)
    return table


def everything(workloads: list[Workload], out: Path, left_out: dict[str, str]) -> dict:
    """All results as plain data, with facts about the machine."""
    recorded = [(workload, run(workload, out)) for workload in workloads]
    facts = measure.machine()
    flops_per_second = measure.product_rate(setups.DTYPE)
    bytes_per_second = float(facts["copy_bandwidth_GBps"]) * 1e9
    facts["product_TFLOPps"] = f"{flops_per_second / 1e12:.2f}"
    return {
        "machine": facts,
        "device": setups.device(),
        "dtype": str(setups.DTYPE).removeprefix("torch."),
        "left_out": left_out,
        "workloads": [figures.of_workload(w, found, flops_per_second, bytes_per_second) for w, found in recorded],
    }


def _tell_expectations(setup: Setup) -> None:
    console.print(f"\n[bold]{setup.title}[/bold]" + (f"  [dim]{setup.note}[/dim]" if setup.note else ""))
    console.print("I expect:")
    for expectation in setup.expectations:
        console.print(f"  - {expectation.claim}")


def tell(setup: dict) -> None:
    """Prints the kernel table of a set-up, and the outcome of its expectations."""
    table = Table(title=f"what {setup['title']} launched in one forward")
    table.add_column("launch", overflow="ellipsis", no_wrap=True, max_width=56)
    table.add_column("kind", max_width=12)
    for column in ("calls", "us", "share"):
        table.add_column(column, justify="right")
    for row in kernel_rows(setup):
        table.add_row(row["name"], row["kind"], str(row["calls"]), f"{row['us']:.1f}", f"{row['share']:.0%}")
    console.print(table)
    console.print(
        f"{setup['ops']} ops a forward, CPU time before the first launch {setup['cpu_before_launch_us']:.0f} us, "
        f"launches run {setup['busy_us']:.0f} us"
    )
    for mark in setup["expectations"]:
        style, word = ("green", "held") if mark["held"] else ("bold red", "NOT HELD")
        console.print(f"  [{style}]{word}[/{style}] {mark['claim']}: [dim]seen[/dim] {mark['seen']}")
