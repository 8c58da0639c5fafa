"""A small model of every type in transformers, fused and unfused: is it ever slower or less accurate?

    python benchmarks/models/every_type.py  two layers of 256 features
    python benchmarks/models/every_type.py --types bert swinv2 --width 512 --hidden 2048

Such models are host-bound, so their times show the host overhead of fusion. A second unfused copy runs interleaved with
both; its difference from the first is noise. "over" is the ratio of the fused model's lower quartile to the slower of
the two. Errors are relative to the unfused model in float32, for the first result and all gradients.
"""

import copy
import math
import multiprocessing
import queue
import statistics
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import points
import torch
import transformers
from points import DEVICE, ON_GPU
from rich.table import Table
from torch import nn
from tqdm import tqdm

import measure
from survey import tiny

DTYPE = torch.bfloat16 if ON_GPU else torch.float32
CALLS = (("inference", 1, 1), ("inference", 8, 256), ("training", 2, 64), ("training", 8, 256))  # mode, batch, tokens
SLOWER, WORSE = 1.03, 1.3  # limits above which a type is listed


def inputs_of(model: nn.Module, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    config, name = model.config, model.main_input_name
    size = getattr(config, "image_size", None) or 224
    size = size if isinstance(size, int) else size[0]
    shapes = {
        "pixel_values": (batch, getattr(config, "num_channels", None) or 3, size, size),
        "input_features": (
            batch,
            getattr(config, "num_mel_bins", 80),
            2 * getattr(config, "max_source_positions", 100),
        ),
        "input_values": (batch, 8000),
    }
    if name != "input_ids":
        given = {name: torch.randn(shapes[name], device=DEVICE, dtype=DTYPE)}
    else:
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        tokens = min(tokens, most - 4) if isinstance(most, int) and most > 16 else tokens
        given = {name: torch.randint(3, 200, (batch, tokens), device=DEVICE)}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = torch.randint(3, 200, (batch, min(tokens, 32)), device=DEVICE)
    return given


def run(model: nn.Module, mode: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(mode == "training"):
        results = model(**given).values()
        result = next(each for each in results if isinstance(each, torch.Tensor) and each.is_floating_point())
        if mode == "training":
            result.float().square().mean().backward()
    return result


def without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for config in (model.config, model.config.get_text_config()):
        for name, value in list(vars(config).items()):
            if isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
                setattr(config, name, 0.0)
    return model


def errors(models: dict[str, nn.Module], mode: str, given: dict[str, torch.Tensor]) -> dict[str, float]:
    """For the unfused and the fused model, the larger of the errors of the result and of the gradients."""
    wide = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}
    expected = run(models["wide"], mode, wide).double()
    exact = [parameter.grad for parameter in models["wide"].parameters()]
    found = {}
    for name in ("unfused", "fused"):
        off, norm = (run(models[name], mode, given).double() - expected).norm(), expected.norm()
        pairs = [(p.grad, g) for p, g in zip(models[name].parameters(), exact, strict=True)]
        assert all((got is None) == (grad is None) for got, grad in pairs), f"{name}: a gradient is missing"
        gradients = [(got.double() - grad.double(), grad.double()) for got, grad in pairs if grad is not None]
        of_all = [math.sqrt(sum(float(each[i].square().sum()) for each in gradients)) for i in (0, 1)]
        found[name] = max(float(off / norm), of_all[0] / of_all[1] if of_all[1] > 0 else 0.0)
    return found


def times(models: dict[str, nn.Module], mode: str, given: dict[str, torch.Tensor], seconds: float) -> dict[str, float]:
    """The lower quartile of each model's calls, interleaved."""
    names = ["unfused", "fused", "again"]
    taken = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while len(taken["again"]) < 8 or time.perf_counter() < end:
        names.append(names.pop(0))
        for name in names:
            measure.synchronize()
            start = time.perf_counter()
            run(models[name], mode, given)
            measure.synchronize()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.quantiles(of, n=4)[0] * 1e3 for name, of in taken.items()}


def figures(kernel, model_type: str, arguments) -> list[dict]:
    torch.manual_seed(0)
    model = without_dropout(tiny.build(model_type, arguments.width, arguments.hidden)).to(DEVICE, DTYPE)
    models = {name: copy.deepcopy(model) for name in ("fused", "again")}
    models |= {"unfused": model, "wide": copy.deepcopy(model).float()}
    kernel.fuse_mlps(models["fused"])
    found = []
    for mode, batch, tokens in CALLS:
        for each in models.values():
            each.train(mode == "training")
        given = inputs_of(model, batch, tokens)
        for name in ("fused", "unfused", "again"):
            run(models[name], mode, given)
        of = errors(models, mode, given)
        taken = times(models, mode, given, arguments.seconds)
        over = taken["fused"] / max(taken["unfused"], taken["again"])
        call = f"{mode}, {batch} x {tokens}"
        found.append({"type": model_type, "call": call, "ms": taken, "over": over, "errors": of})
    return found


def work(types: multiprocessing.Queue, results: multiprocessing.Queue, arguments) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    kernel = points.package()
    while True:
        try:
            model_type = types.get(timeout=1)
        except queue.Empty:
            return
        try:
            results.put((model_type, figures(kernel, model_type, arguments)))
        except Exception as error:  # these inputs do not fit the model
            results.put((model_type, points.words(error)))
            if ON_GPU and isinstance(error, torch.AcceleratorError):
                return  # the process has lost its GPU


def collected(types: list[str], arguments) -> dict[str, list[dict] | str]:
    context = multiprocessing.get_context("spawn")
    todo, results, found = context.Queue(), context.Queue(), {}
    for each in types:
        todo.put(each)
    start = lambda: context.Process(target=work, args=(todo, results, arguments), daemon=True)  # noqa: E731
    workers = [start() for _ in range(arguments.processes)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + 60 * arguments.minutes if arguments.minutes > 0 else math.inf
    with tqdm(total=len(types), unit="type", disable=None) as progress:
        while len(found) < len(types) and time.monotonic() < end:
            try:
                model_type, of_type = results.get(timeout=2)
                found[model_type] = of_type
                progress.update()
            except queue.Empty:
                for place, worker in enumerate(workers):
                    if not worker.is_alive():
                        workers[place] = start()
                        workers[place].start()
    for worker in workers:
        worker.terminate()
    return found


def show(found: dict) -> None:
    calls = [call for of_type in found["types"].values() if isinstance(of_type, list) for call in of_type]
    table = Table(
        "call", "types", "fused / unfused, median", f"slower than {SLOWER}", f"errors above {WORSE} of eager's"
    )
    for name in dict.fromkeys(call["call"] for call in calls):
        of = [call for call in calls if call["call"] == name]
        ratio = statistics.median(call["ms"]["fused"] / call["ms"]["unfused"] for call in of)
        slower = [f"{call['type']} {call['over']:.2f}" for call in of if call["over"] > SLOWER]
        worse = [call["type"] for call in of if call["errors"]["fused"] > WORSE * call["errors"]["unfused"] + 2e-3]
        table.add_row(name, str(len(of)), f"{ratio:.3f}", "\n".join(slower), "\n".join(worse))
    points.show(table, 120)
    left = sum(isinstance(of_type, str) for of_type in found["types"].values())
    print(f"{left} types do not run with such inputs: {points.where(found)}")


def main() -> None:
    parser = points.parser(__doc__, "bench/every_type", minutes=0, seconds=0.3)
    parser.add_argument("--types", nargs="+", default=tiny.model_types())
    parser.add_argument("--width", type=int, default=256, help="features between layers")
    parser.add_argument("--hidden", type=int, default=1024, help="features within an MLP")
    parser.add_argument("--processes", type=int, default=4 if ON_GPU else 1)
    arguments = parser.parse_args()
    found = points.found_by(
        lambda given: {"machine": measure.machine(), "types": collected(given.types, given)}, arguments
    )
    points.write(found, arguments.out)
    show(found)


if __name__ == "__main__":
    main()
