"""Whole models, fused against unfused: wall time of a forward in eager, compiled, and compiled into CUDA graphs.

    python benchmarks/models/models.py                           every model of this machine's list
    python benchmarks/models/models.py --models bert-base gpt2 --modes eager
    python benchmarks/models/models.py --from build/models.json  show the results of such a run; measure nothing

The architectures have their real widths and depths, and random weights. Copies of one model differ by several percent,
so both variants are built several times from the same seed. In a turn, a copy of each runs right after the other, long
enough for the clock to settle, at a random depth of Python's stack, which affects the time. A ratio compares such
neighbours. A figure is the median over the copies of each copy's median over its turns; the spread is that of the
copies.

"In place" is the CPU time of the part of a layer after its attention, inside the running model, where the caches hold
what the rest of the model left there: the MLP with its norm and the residual sums. Writes <out>.json and <out>.svg, and
prints a table.
"""

import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import diffusers
import plots
import points
import torch
import transformers
from points import DEVICE, ON_GPU
from rich.table import Table
from torch import nn
from tqdm import tqdm

import measure

MODES = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}  # torch.compile's names of the modes


@dataclass(frozen=True)
class Workload:
    """A model and an input for it; ``attention`` names the modules after which CPU time is measured in place.

    ``alike`` is the relative difference of a fused model's output that bfloat16 can cause.
    """

    name: str
    size: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    attention: str | None = None
    dtype: torch.dtype = torch.bfloat16
    alike: float = 3e-2

    @property
    def title(self) -> str:
        return f"{self.name} {self.size}"


def ids(batch: int, tokens: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"input_ids": torch.randint(2, 30_000, (batch, tokens), device=DEVICE)}


def noise(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: torch.randn(shape, device=DEVICE, dtype=dtype)}


def denoising(**shapes: tuple[int, ...]) -> Callable[[], dict[str, torch.Tensor]]:
    """A step with classifier-free guidance: each input twice, with noise and with text."""

    def inputs() -> dict[str, torch.Tensor]:
        made = {"timestep": torch.full((2,), 500, device=DEVICE)}
        for name, shape in shapes.items():
            made |= noise(name, 2, *shape)()
        return made

    return inputs


def minilm():
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return transformers.BertModel(transformers.BertConfig(**sizes))


def bert():
    return transformers.BertModel(transformers.BertConfig())


def vit():
    return transformers.ViTModel(transformers.ViTConfig())


def whisper_encoder():
    sizes = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
    config = transformers.WhisperConfig(**sizes, decoder_layers=1, decoder_attention_heads=8)
    return transformers.WhisperModel(config).encoder


def flan_t5_encoder():
    sizes = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


def llama():
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def small_llama():
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 49_152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def gemma():
    sizes = {"hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 18, "head_dim": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1}
    return transformers.GemmaModel(transformers.GemmaConfig(**sizes, **heads, vocab_size=32_000, use_cache=False))


def gemma2():
    sizes = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "head_dim": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return transformers.Gemma2Model(transformers.Gemma2Config(**sizes, **heads, vocab_size=32_000, use_cache=False))


def dinov2():
    return transformers.Dinov2Model(transformers.Dinov2Config())


def sd3():
    sizes = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192}
    return diffusers.SD3Transformer2DModel(**sizes)


sd3_step = denoising(hidden_states=(16, 64, 64), encoder_hidden_states=(154, 4096), pooled_projections=(2048,))


def pixart():
    sizes = {"num_layers": 28, "sample_size": 64, "caption_channels": 4096}
    return diffusers.PixArtTransformer2DModel(**sizes, use_additional_conditions=False)


def sd1_unet():
    return diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)


GPU_WORKLOADS = [
    Workload("minilm", "16 x 20", minilm, ids(16, 20), "attention"),
    Workload("minilm", "64 x 128", minilm, ids(64, 128), "attention"),
    Workload("bert-base", "8 x 128", bert, ids(8, 128), "attention"),
    Workload("vit-b/16", "1 image", vit, noise("pixel_values", 1, 3, 224, 224), "attention"),
    Workload("vit-b/16", "8 images", vit, noise("pixel_values", 8, 3, 224, 224), "attention"),
    Workload("whisper-base encoder", "30 s", whisper_encoder, noise("input_features", 1, 80, 3000), "self_attn"),
    Workload("flan-t5-base encoder", "8 x 128", flan_t5_encoder, ids(8, 128)),
    Workload("gpt2", "1 token", gpt2, ids(1, 1), "attn"),
    Workload("gpt2", "2048 tokens", gpt2, ids(2, 1024), "attn"),
    Workload("llama-1b", "1 token", llama, ids(1, 1), "self_attn"),
    Workload("llama-1b", "2048 tokens", llama, ids(1, 2048), "self_attn"),
    Workload("gemma-2b", "512 tokens", gemma, ids(1, 512), "self_attn"),
    Workload("gemma-2-2b", "1 token", gemma2, ids(1, 1), "self_attn"),
    # In bfloat16 the original DINOv2 itself differs by 6% from its result in float32.
    Workload("dinov2-base", "8 images", dinov2, noise("pixel_values", 8, 3, 224, 224), "attention", alike=7e-2),
    Workload("sd3-medium", "2 x 512 px", sd3, sd3_step),
    Workload(
        "pixart-alpha", "2 x 512 px", pixart, denoising(hidden_states=(4, 64, 64), encoder_hidden_states=(120, 4096))
    ),
    Workload("sd-1.5 unet", "2 x 512 px", sd1_unet, denoising(sample=(4, 64, 64), encoder_hidden_states=(77, 768))),
]
CPU_WORKLOADS = [
    Workload("minilm", "16 x 20", minilm, ids(16, 20), "attention"),
    Workload("minilm float32", "16 x 20", minilm, ids(16, 20), "attention", torch.float32),
    Workload("bert-base", "1 x 128", bert, ids(1, 128), "attention"),
    Workload("vit-b/16", "1 image", vit, noise("pixel_values", 1, 3, 224, 224), "attention"),
    Workload("gpt2", "64 tokens", gpt2, ids(1, 64), "attn"),
    Workload("llama of 576", "1 token", small_llama, ids(1, 1), "self_attn"),
    Workload("llama of 576", "128 tokens", small_llama, ids(1, 128), "self_attn"),
]
WORKLOADS = GPU_WORKLOADS if ON_GPU else CPU_WORKLOADS


def built(work: Workload, fused_mlp) -> nn.Module:
    """A fresh copy of the model, the same weights every time; fused if ``fused_mlp`` is given."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(work.dtype)
    try:
        with torch.device(DEVICE):
            model = work.build().eval()
    finally:
        torch.set_default_dtype(default)
    if fused_mlp is not None:
        report = fused_mlp.fuse_mlps(model)
        if not report.fused:
            sys.exit(f"nothing was fused in {work.name}:\n{report}")
    return model


def variants(work: Workload, mode: str, copies: int, fused_mlp) -> dict[str, list[Callable]]:
    """The copies of the original and of the fused model as callables, by name: "eager" and "eager fused" and so on."""
    made = {mode: None, f"{mode} fused": fused_mlp}
    for name, package in made.items():
        models = [built(work, package) for _ in range(copies)]
        made[name] = models if mode == "eager" else [torch.compile(each, mode=MODES[mode]) for each in models]
    return made


def output(model: Callable, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(each for each in model(**inputs).values() if isinstance(each, torch.Tensor)).float().clone()


def check_alike(work: Workload, made: dict[str, list[Callable]], inputs: dict[str, torch.Tensor]) -> None:
    expected = output(next(iter(made.values()))[0], inputs)
    for name, models in made.items():
        for model in models:
            difference = ((output(model, inputs) - expected).norm() / expected.norm()).item()
            if not difference <= work.alike:
                sys.exit(f"{work.title}, {name}: the output differs by {difference:.1e} from the original's")


class Timed(nn.Module):
    """Wraps a module."""

    def __init__(self, inner: Callable) -> None:
        super().__init__()
        self.forward = inner


def time_behind(model: nn.Module, attention: str) -> list[int]:
    """Times the layers of a model from the end of their attention, at each call from now on."""
    nanoseconds: list[int] = []
    for layer in list(model.modules()):
        if attention in layer._modules:
            ended = []
            layer._modules[attention] = Timed(behind(layer._modules[attention].__call__, ended.append))
            taken = lambda now, ended=ended: nanoseconds.append(now - ended.pop())  # noqa: E731
            vars(layer)["forward"] = behind(layer.forward, taken)
    return nanoseconds


def behind(inner: Callable, tell: Callable[[int], None]) -> Callable:
    """Passes the time at the end of each call to `tell`."""

    @functools.wraps(inner)
    def run(*given, **named):
        out = inner(*given, **named)
        tell(time.perf_counter_ns())
        return out

    return run


def in_place(work: Workload, copies: int, rounds: int, fused_mlp) -> dict[str, float]:
    """Median CPU microseconds of a layer after its attention, in the running model, original and fused, interleaved."""
    inputs = work.inputs()
    taken: dict[str, list[list[int]]] = {}
    models = []
    for _ in range(copies):
        for name, package in (("eager", None), ("eager fused", fused_mlp)):
            models.append(built(work, package))
            taken.setdefault(name, []).append(time_behind(models[-1], work.attention))

    def some_forwards(model: nn.Module) -> None:
        for _ in range(6):
            model(**inputs)
            measure.synchronize()

    for turn in range(rounds + 1):
        for model in models:
            measure.at_any_depth(partial(some_forwards, model))
        for nanoseconds in itertools.chain(*taken.values()) if turn == 0 else ():
            nanoseconds.clear()  # the first turn warms up
    return {name: statistics.median(itertools.chain(*some)) / 1e3 for name, some in taken.items()}


def versions() -> dict[str, str]:
    return {library.__name__: library.__version__ for library in (transformers, diffusers)}


def summary(copies: list[dict[str, float]], what: str) -> dict[str, float]:
    values = [figures[what] for figures in copies]
    return {what: statistics.median(values), "low": min(values), "high": max(values)}


def run(given) -> dict:
    fused_mlp = points.package()
    chosen = [work for work in WORKLOADS if not given.models or work.name in given.models]
    found = {"machine": {**measure.machine(), "copies": given.copies, **versions()}}
    found["results"] = results = []
    # All copies share the code of a class. Past torch's limit of compilations per code, they would run uncompiled.
    torch._dynamo.config.recompile_limit = max(2 * given.copies, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    with torch.inference_mode(), tqdm(total=len(chosen) * len(given.modes), disable=None) as progress:
        for work in chosen:
            result = {"model": work.name, "size": work.size, "dtype": str(work.dtype).removeprefix("torch.")}
            result["variants"], result["ratios"] = {}, {}
            inputs = work.inputs()
            for mode in given.modes:
                progress.set_description(f"{work.title}, {mode}")
                made = variants(work, mode, given.copies, fused_mlp)
                check_alike(work, made, inputs)
                calls = {name: [partial(model, **inputs) for model in models] for name, models in made.items()}
                figures = measure.copies_in_turns(calls, given.rounds, given.seconds * 1e6)
                result["ratios"][mode] = summary(figures[f"{mode} fused"], "ratio")
                result["variants"] |= {name: summary(each, "ms") for name, each in figures.items()}
                del made, calls
                points.tidy()
                progress.update()
            if work.attention is not None and "eager" in given.modes:
                result["in_place_us"] = in_place(work, given.copies, given.rounds, fused_mlp)
                gc.collect()
            results.append(result)
            points.write(found, given.out)
    return found


def measured_modes(results: list[dict]) -> list[str]:
    return [mode for mode in MODES if any(mode in result["variants"] for result in results)]


def print_table(found: dict) -> None:
    results = found["results"]
    modes = measured_modes(results)
    table = Table(title=f"{points.where(found)}: time of fused against not, in the same mode (spread of the copies)")
    table.add_column("model", no_wrap=True)
    for mode in modes:
        table.add_column(f"{mode}, ms", justify="right", no_wrap=True)
        table.add_column("fused", justify="right", no_wrap=True)
    table.add_column("in place", justify="right", no_wrap=True)
    for result in results:
        row, figures = [f"{result['model']} {result['size']}"], result["variants"]
        for mode in modes:
            if mode not in figures:
                row += ["", ""]
                continue
            spread = (figures[mode]["high"] - figures[mode]["low"]) / figures[mode]["ms"]
            row += [f"{figures[mode]['ms']:.2f} ±{50 * spread:.0f}%", f"{result['ratios'][mode]['ratio']:.2f}"]
        place = result.get("in_place_us")
        row.append(f"{place['eager']:.0f} -> {place['eager fused']:.0f} us" if place else "")
        table.add_row(*row)
    points.show(table, 118)


def main():
    parser = points.parser(__doc__, "models", rounds=5, seconds=0.2)
    parser.add_argument("--models", nargs="+", choices=sorted({work.name for work in WORKLOADS}))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES) if ON_GPU else ["eager", "compiled"])
    parser.add_argument("--copies", type=int, default=5, help="fresh instances of each variant")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    found = points.found_by(run, given)
    print_table(found)
    plots.models(found["results"], points.where(found), given.out)


if __name__ == "__main__":
    main()
