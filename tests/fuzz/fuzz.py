"""Fuses random modules, and checks that each behaves as before and that restoring gives back the original.

    python tests/fuzz/fuzz.py --cases 10000 --processes 2

A failed case prints its seed and the source of its module; `--seed SEED --cases 1` runs it again.
"""

import argparse
import collections
import contextlib
import importlib.util
import itertools
import linecache
import multiprocessing
import random
import sys
import tempfile
import traceback
import types
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "tests/support", "tests/samples"))
import machine
import project
from fuzz_modules import Source, Writer

# Least share of cases to be fused in each pattern and to each extent: a fuser that fuses nothing is never wrong.
LEAST = {
    **{"plain": 0.02, "linear": 0.05, "gated linear": 0.01, "packed gated": 0.01, "pointwise": 0.005},
    **{"full": 0.1, "partly": 0.005, "with LoRA": 0.02},
}

FUNCTIONS = ("linear", "gelu", "silu", "relu", "sigmoid", "dropout")


class Recorder(TorchFunctionMode):
    """Records the torch functions that an MLP calls."""

    def __init__(self, record: list) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in FUNCTIONS:
            self.record.append(name)
        return function(*args, **(kwargs or {}))


class Made:
    """One of several equal modules of a case, and the names in its file."""

    def __init__(self, source: Source, folder: Path, dtype: torch.dtype | None = None) -> None:
        self.source = source
        self.names = load(source, folder)
        seed_torch(source.seed)
        self.module = self.names["Made"]().to(getattr(torch, source.dtype))
        self.module.train(source.training)
        self.names["before"](self.module)
        self.root = self.names["hold"](self.module)
        draw = random.Random(source.seed)
        share = draw.choice((1.0, 1.0, 0.5, 0.0))
        for parameter in settable(self.root):
            parameter.requires_grad_(draw.random() < share)
        self.dtype = dtype or getattr(torch, source.dtype)
        if dtype is not None:
            self.root.to(dtype)

    def run(self) -> dict:
        """Returns the results of a call and the state after it."""
        source, record = self.source, self.names["record"]
        record.clear()
        self.root.zero_grad()
        x = laid_out(source).to(self.dtype)
        x.requires_grad_(source.x_grad)
        seed_torch(source.seed)
        try:
            with ambient(source, record):
                result = eval(f"root({source.arguments})", {"root": self.root, "x": x})
        except Exception as error:
            return {"error": error}
        seen = {"result": result, "random numbers": torch.get_rng_state()}
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if outputs and torch.is_grad_enabled():
            try:
                seen["gradient"] = self.backward(sum(map(loss_of, outputs)), x)
            except RuntimeError as error:
                return {**seen, "error": error}
        seen["gradients"] = {name: parameter.grad for name, parameter in self.root.named_parameters()}
        seen["gradient of x"], seen["x"] = x.grad, x.detach()
        seen["state"] = {name: value.detach().clone() for name, value in tensors(self.root).items()}
        attributes = ("calls", "flag", "last", "training", "act_left")
        seen["attributes"] = {name: vars(self.module)[name] for name in attributes if name in vars(self.module)}
        seen["calls"] = list(record)
        return seen

    def backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Computes all gradients, possibly after changing a parameter, or a single one, which it returns."""
        draw, parameters = random.Random(self.source.seed), settable(self.root)
        wanted = [each for each in (x, *parameters) if each.requires_grad]
        way = draw.choice(("all", "all", "one", "changed", "replaced"))
        linear = [each for each in self.module.children() if type(each) is nn.Linear]
        if way == "one" and wanted:
            return torch.autograd.grad(loss, draw.choice(wanted), allow_unused=True)[0]
        if way == "changed" and parameters:
            with torch.no_grad():
                draw.choice(parameters).mul_(0.5)
        if way == "replaced" and linear:
            weight = draw.choice(linear).weight
            weight.data = weight.data * 0.5
        loss.backward()
        return None

    def watch(self) -> None:
        """Records the calls of all parts and the strides of their results."""
        record = self.names["record"]
        for path, part in self.root.named_modules():
            if not isinstance(part, torch.jit.ScriptModule):
                part.register_forward_hook(
                    lambda part, args, out, path=path: record.append(
                        (path, isinstance(out, torch.Tensor) and out.stride())
                    )
                )


def load(source: Source, folder: Path) -> dict:
    """Runs the file as an import, a notebook or exec does."""
    if source.place == "file":
        path = folder / "case.py"
        if not path.exists() or path.read_text() != source.text:
            path.write_text(source.text)
        spec = importlib.util.spec_from_file_location("case", path)
        loaded = importlib.util.module_from_spec(spec)
        exec(compile(source.text, str(path), "exec"), vars(loaded))
        return vars(loaded)
    loaded = types.ModuleType("case")
    name = f"<{source.place} {source.seed}>"
    if source.place == "linecache":
        linecache.cache[name] = (len(source.text), None, source.text.splitlines(keepends=True), name)
    exec(compile(source.text, name, "exec"), vars(loaded))
    return vars(loaded)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Weights the squares: after a norm their plain sum is constant, and its gradients only rounding errors."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float32).view(output.shape)
    return (output.square() * weights).sum()


def seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for absent GPUs


@contextlib.contextmanager
def ambient(source: Source, record: list):
    made = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "function mode": lambda: Recorder(record),
        "default device": lambda: torch.device("cpu"),
    }
    with contextlib.ExitStack() as stack:
        for name in source.ambient.split(", "):
            stack.enter_context(made[name]())
        yield


def laid_out(source: Source) -> torch.Tensor:
    seed_torch(source.seed + 1)
    x = torch.randn(source.shape).to(getattr(torch, source.dtype))
    if source.layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if source.layout == "sliced":
        return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]
    if source.layout == "expanded" and x.dim() > 1 and len(x):
        return x[:1].expand(x.shape)
    if source.layout == "misaligned":
        return torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape)
    if source.layout == "negated":
        return torch._neg_view(x)
    if source.layout == "without memory":
        return torch._efficientzerotensor(x.shape, dtype=x.dtype)
    return x


def settable(root: nn.Module) -> list[nn.Parameter]:
    """Returns the initialised parameters that are not inference tensors."""
    return [each for each in root.parameters() if not (nn.parameter.is_lazy(each) or each.is_inference())]


def tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    named = itertools.chain(root.named_parameters(), root.named_buffers())
    return {name: tensor for name, tensor in named if not nn.parameter.is_lazy(tensor)}


def identity(root: nn.Module, mark: str) -> dict:
    """Returns everything that fusing must not change; marked modules also hold fused methods."""
    found = {"random numbers": torch.get_rng_state().tolist(), "Python's": random.getstate()}
    for path, part in root.named_modules():
        attributes = {"the class": type(part)}
        if isinstance(part, torch.jit.ScriptModule):
            continue
        fused = {mark, "_replicate_for_data_parallel", *vars(part)[mark]} if mark in vars(part) else ()
        for name, value in vars(part).items():
            if name in fused:
                continue
            if isinstance(value, types.MethodType) and value.__func__ is getattr(type(part), name, None):
                continue  # a bound method of the class's own
            attributes[name] = (
                [(key, id(each)) for key, each in value.items()] if isinstance(value, dict) else id(value)
            )
        found[path] = attributes
    for name, tensor in tensors(root).items():
        version = None if tensor.is_inference() else tensor._version
        found[f"value of {name}"] = (version, tensor.data_ptr(), tensor.stride(), tensor.tolist())
    return found


# Comparison.


def compare(fused: dict, plain: dict, exact: dict | None, bitwise: bool, dtype: torch.dtype, in_block: bool) -> None:
    """Compares results computed in ``dtype``, which may be narrower than theirs."""
    if "error" in plain or "error" in fused:
        assert "error" in plain, f"raises {fused['error']!r}, the original does not"
        if "inplace" in str(plain["error"]):
            return  # autograd complains of values that a fused call does not make or keep
        assert "error" in fused, f"does not raise {plain['error']!r}"
        assert isinstance(fused["error"], type(plain["error"])), f"raises {fused['error']!r}, not {plain['error']!r}"
        return
    exact = exact if exact is not None and "error" not in exact else plain
    for what, expected in plain.items():
        leaves = [tree_flatten(seen[what]) for seen in (fused, plain, exact)]
        assert leaves[0][1] == leaves[1][1], f"{what}: another structure"
        wide = leaves[2][0] if leaves[2][1] == leaves[1][1] else leaves[1][0]
        # A gradient behind a norm can be the small difference of larger ones.
        largest = max(map(_largest, wide), default=0.0) if what == "gradients" else 0.0
        for got, like, reference in zip(leaves[0][0], leaves[1][0], wide, strict=True):
            if not isinstance(like, torch.Tensor):
                assert got == like, f"{what}: {got!r}, expected {like!r} (all: {fused[what]!r}, expected {expected!r})"
            else:
                compare_tensors(what, got, like, reference, bitwise, dtype, in_block and what == "result", largest)


def _largest(value: object) -> float:
    is_compared = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0
    return value.detach().double().abs().max().nan_to_num(0.0, 0.0).item() if is_compared else 0.0


def compare_tensors(
    what: str,
    got: torch.Tensor,
    like: torch.Tensor,
    exact: torch.Tensor,
    bitwise: bool,
    dtype: torch.dtype,
    in_block: bool,
    largest: float,
) -> None:
    """``in_block``: a block's op gives a contiguous result for any residual. ``largest``: the least magnitude that
    rounding errors are relative to."""
    for property_ in (type, lambda t: t.dtype, lambda t: t.shape, lambda t: t.requires_grad):
        assert property_(got) == property_(like), f"{what}: {property_(got)}, expected {property_(like)}"
    assert got.stride() == like.stride() or (in_block and got.is_contiguous()), (
        f"{what}: {got.stride()}, {like.stride()}"
    )
    got, like, exact = (t.detach().as_subclass(torch.Tensor) for t in (got, like, exact))
    if bitwise or not like.is_floating_point():
        assert torch.equal(got.nan_to_num(7), like.nan_to_num(7)), f"{what} is not bit for bit that of the original"
        return
    assert torch.equal(got.isfinite(), like.isfinite()), f"{what}: not finite elsewhere"
    if not like.numel() or not bool(like.isfinite().all()):
        return
    # An activation that computes in float32 may be fused in float64 too.
    coarsest = max(torch.finfo(torch.float32 if each == torch.float64 else each).eps for each in (like.dtype, dtype))
    scale = max(largest, _largest(exact))
    limit = 3 * (like.double() - exact.double()).abs().max() + 16 * coarsest * scale + 1e-30
    error = (got.double() - exact.double()).abs().max()
    assert error <= limit, f"{what} {list(like.shape)}: error {error:.1e}, more than {limit:.1e}"


# One case.


def source_of(seed: int) -> Source:
    """Returns a seed's first source that is valid Python."""
    writer = Writer(seed)
    while True:
        source = writer.source()
        with contextlib.suppress(SyntaxError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source.text, "case", "exec")
            return source


def check(fused_mlp, source: Source, folder: Path) -> list[str]:
    """Raises AssertionError if fusing changes a module's behaviour; otherwise returns the outcomes."""
    fused, plain = (Made(source, folder) for _ in range(2))
    lazy = any(map(nn.parameter.is_lazy, plain.root.parameters()))
    exact = None if lazy or "autocast" in source.ambient else Made(source, folder, torch.float64)
    fused.names["record"].clear()
    mark = f"{fused_mlp.__name__}_fused"
    before = identity(fused.root, mark)
    fused_mlp.fuse_mlps(fused.root).restore()
    assert not any(mark in vars(part) for part in fused.root.modules()), "a method is not given back"
    assert_same_state(identity(fused.root, mark), before)
    report = fused_mlp.fuse_mlps(fused.root, verify=source.seed % 2 == 0)
    assert_same_state(identity(fused.root, mark), before)
    assert fused.names["record"] == [], "fusing calls the module"
    # A single layer whose activation has no kernel is not an MLP.
    assert report.modules or not source.is_clear or "linear" in source.kind, "neither fused nor reported"
    for entry in report.left:
        assert entry.reason, "left without a reason"
        assert "error" not in {reason.code for reason in entry.reasons}, (
            f"an error of the package's own: {entry.reason}"
        )
    text = f"{report}\n{fused_mlp.explain(fused.root)}"
    # Code in another branch may run later.
    waiting = any(reason.code == "other branch" for entry in report.left for reason in entry.reasons)
    # A module that runs as written for now, due to hooks, adapters, dtype or device, still holds a method that may
    # fuse later, and autocast may cast operands without a kernel to a dtype with one.
    asks = any(reason.code in ("called", "no kernel", "own way") for entry in report.left for reason in entry.reasons)
    is_left = all(entry.extent == "none" for entry in report.modules) and not (report.norms or report.attentions)
    bitwise = is_left and not waiting and not asks
    in_block = any("residual" in entry.pattern for entry in report.fused)
    assert text and not (bitwise and any(mark in vars(part) for part in fused.root.modules()))

    outcomes = []
    casts = "autocast" in source.ambient or "autocast" in source.text
    dtype = torch.bfloat16 if casts else getattr(torch, source.dtype)
    copies = [made for made in (fused, plain, exact) if made is not None]
    for phase in ("fused", "changed", "watched", "restored"):
        for made in copies:
            seed_torch(source.seed)
            if phase == "changed":
                made.names["later"](made.module)
            elif phase == "watched":
                made.watch()
        if phase == "restored":
            report.restore()
        seen = [made.run() for made in copies]
        if exact is not None and "error" in seen[2] and "error" not in seen[1]:
            del copies[2]  # it stopped half-way, so its values differ from now on
            exact = None
        outcomes += ["raised"] if "error" in seen[1] and phase == "fused" else []
        try:
            compare(*seen[:2], seen[2] if exact is not None else None, bitwise, dtype, in_block)
        except AssertionError as error:
            raise AssertionError(f"{phase}: {error}\n{report}") from error
    entries = [(entry.pattern, entry.extent, *(reason.code for reason in entry.reasons)) for entry in report.modules]
    return [*outcomes, *dict.fromkeys(itertools.chain(*entries) if entries else ["nothing found"])]


def check_bits(fused_mlp, source: Source, folder: Path) -> None:
    """In training mode, a call under no_grad has the bits of a recorded one if the original's does."""

    def are_same(is_fused: bool) -> bool | None:
        results = []
        for name in ("grad", "no_grad"):
            made = Made(replace(source, ambient=name), folder)
            for parameter in settable(made.root):
                parameter.requires_grad_(True)  # frozen parameters and an input without gradients run as in inference
            if is_fused:
                fused_mlp.fuse_mlps(made.root)
            seen = made.run()
            if "error" in seen:
                return None
            results.append([leaf for leaf in tree_flatten(seen["result"])[0] if isinstance(leaf, torch.Tensor)])
        return all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(*results, strict=True))

    if are_same(False):
        assert are_same(True) is not False, "other bits where nothing is recorded"


def assert_same_state(now: dict, before: dict) -> None:
    for name in before | now:
        assert now.get(name) == before.get(name), f"fusing changes {name}: {before.get(name)} to {now.get(name)}"


def outcome(fused_mlp, seed: int, folder: Path) -> list[str]:
    """Runs :func:`check` for a seed; a failure shows the source.

    TorchScript optimises a class for its first call, in any copy. A later call of another copy then differs by itself:
    under autocast its backward raises.
    """
    source = source_of(seed)
    try:
        with warnings.catch_warnings(), torch.jit.optimized_execution(False):
            warnings.simplefilter("ignore")
            found = check(fused_mlp, source, folder)
            if source.training and source.ambient == "grad":
                check_bits(fused_mlp, source, folder)
            return found
    except Exception as error:
        raise AssertionError(f"{source}\n{type(error).__name__}: {error}") from error
    finally:
        linecache.cache.pop(f"<linecache {seed}>", None)


def assert_enough(counts: collections.Counter, cases: int) -> None:
    """Asserts that enough modules were fused for the comparisons to be meaningful."""
    found = {name: sum(count for words, count in counts.items() if name in words) for name in LEAST}
    few = {name: count for name, count in found.items() if count < LEAST[name] * cases}
    assert not few, f"of {cases} cases too few are {few}"


# Many cases.


def load_kernel():
    from kernels import get_kernel

    kernel = get_kernel(project.repo_id(), version=project.version(), backend=machine.device_type())
    dispatch = sys.modules[f"{kernel.__name__}.dispatch"]
    for least in (dispatch.LEAST_SUM, dispatch.LEAST_NORM):  # small ones become one op too
        least.clear()
    return kernel


_worker = {}


def _start() -> None:
    torch.set_num_threads(1)
    _worker["fused_mlp"] = load_kernel()


def _run(seed: int) -> tuple[int, list[str] | str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return seed, outcome(_worker["fused_mlp"], seed, Path(folder))
        except AssertionError as error:
            lines = traceback.extract_tb(error.__cause__.__traceback__)
            return seed, f"{error}\nat {', '.join(f'{Path(line.filename).name}:{line.lineno}' for line in lines[-3:])}"


def main() -> int:
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the first case")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    print(f"seeds {options.seed} to {options.seed + options.cases - 1}")
    counts, failures = collections.Counter(), 0
    seeds = range(options.seed, options.seed + options.cases)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, _start, maxtasksperchild=1000) as pool:
        for _, found in tqdm(pool.imap_unordered(_run, seeds), total=options.cases, unit="case", disable=None):
            if isinstance(found, str):
                failures += 1
                print(f"\n{found}", file=sys.stderr)
            else:
                counts.update(found)
    for name, count in counts.most_common():
        print(f"{count:8} {name}")
    print(f"{options.cases} cases, {failures} failures")
    if options.cases >= 200:
        assert_enough(counts, options.cases)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
