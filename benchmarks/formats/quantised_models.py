"""Whole Llamas with quantised weights: a decoding step in NF4 and FP8, and a QLoRA step.

A decoding step uses a static cache, in eager mode and in a CUDA graph; all its variants share their weights. In FP8,
`eager` is the model with decoded bfloat16 weights, since transformers' own GEMMs are kernels from the Hub. A QLoRA step
has NF4 weights, PEFT adapters on all linear layers, and AdamW; fresh instances run interleaved.
"""

import copy
from collections.abc import Callable
from functools import partial

import bitsandbytes
import peft
import points
import quantised_fp8
import torch
import training_models
import transformers
from points import DEVICE, ON_GPU
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Linear

import measure

DTYPE = torch.bfloat16
BATCHES = (1, 16)
CACHED, PLACES = 512, 576  # tokens in the cache, and its capacity, as in generate.py
RANK, TRAINED = 16, (4, 1024)
TOLERANCE = 0.1  # of logits: FP8 rounds the decoded weights to bfloat16
BLOCK = (128, 128)


def _llama(width: int, hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 32_000) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return training_models.built(lambda: transformers.LlamaForCausalLM(config), DTYPE)


def _decoding(quick: bool) -> nn.Module:
    return _llama(128, 256, 1, 4, 2, 64) if quick else _llama(4096, 14_336, 8, 32, 8)


def _trained(quick: bool) -> nn.Module:
    return _llama(64, 128, 1, 4, 2, 64) if quick else _llama(2048, 8192, 4, 32, 8)


def replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Replaces all linear layers of the model except the vocabulary's."""
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "head" not in path:
            model.set_submodule(path, make(layer))
    return model


def nf4(layer: nn.Linear) -> nn.Module:
    """bitsandbytes' layer as transformers makes it by default, with scales that are not nested."""
    options = {"quant_type": "nf4", "compress_statistics": False}
    sizes = {"input_features": layer.in_features, "output_features": layer.out_features, "bias": False}
    made = bitsandbytes.nn.Linear4bit(**sizes, compute_dtype=DTYPE, device="meta", **options)
    made.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, module=made, **options)
    return made.to(DEVICE)


def fp8(layer: nn.Linear) -> nn.Module:
    """transformers' layer. Writes the values that it represents into the given layer."""
    out, width = layer.weight.shape
    tiles = layer.weight.data.float().view(out // BLOCK[0], BLOCK[0], width // BLOCK[1], BLOCK[1])
    scales = tiles.abs().amax((1, 3), keepdim=True) / quantised_fp8.LARGEST
    values = (tiles / scales).to(torch.float8_e4m3fn)
    made = FP8Linear(width, out, BLOCK)
    made.weight = nn.Parameter(values.view(out, width), requires_grad=False)
    made.weight_scale_inv = nn.Parameter(scales[:, 0, :, 0].contiguous(), requires_grad=False)
    layer.weight.data = (values.float() * scales).view(out, width).to(DTYPE)
    return made


def twin(model: nn.Module) -> nn.Module:
    """A second model on the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def step_of(model: nn.Module, batch: int) -> Callable[[], Tensor]:
    """A call that decodes one token for each sequence, at the same position each time."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=PLACES)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=DEVICE)
    places = torch.full((1, 1), CACHED, device=DEVICE)
    mask = (torch.arange(PLACES, device=DEVICE) <= CACHED).expand(batch, 1, 1, PLACES)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": places, "past_key_values": cache}

    def run() -> Tensor:
        if cache.layers[0].is_initialized:
            torch._foreach_zero_([layer.cumulative_length for layer in cache.layers])
        return model(**given, use_cache=True).logits

    run()
    for layer in cache.layers:
        layer.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        layer.values.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    return run


def decoding(kind: str, batch: int, fused_mlp, given) -> dict:
    """Figures of a step: wall_us, and on a GPU graph_us."""
    plain = _decoding(given.quick).eval().requires_grad_(False)
    eager, quantised = plain, replace(twin(plain), fp8 if kind == "fp8-blocks" else nf4)
    if kind == "nf4":
        eager, quantised = quantised, twin(quantised)
    steps, reports, left, expected = {}, {}, {}, None
    for name, model in {"eager": eager, "ours": quantised, "ours-bf16": twin(plain)}.items():
        with points.noting(left, name):
            if name != "eager":
                reports[name] = str(fused_mlp.fuse_mlps(model)).splitlines()[0]
            step = step_of(model, batch)
            found = step().float()
            expected = found if name == "eager" else expected
            if name == "ours" and expected is not None and (found - expected).norm() > TOLERANCE * expected.norm():
                raise RuntimeError("the logits differ")
            steps[name] = step
    compare = partial(measure.compare, rounds=given.rounds, budget_us=given.seconds * 1e6)
    figures = points.compared(steps, compare, left)
    if ON_GPU:
        in_graphs = partial(measure.compare_in_graphs, rounds=given.rounds)
        for name, found in points.compared({name: steps[name] for name in figures}, in_graphs, left).items():
            figures[name] |= found
    return {"providers": figures, "reports": reports, "left": left}


def qlora(fused_mlp, given) -> dict:
    """Figures of a training step, measured as in training_models.py."""
    reports = {}

    def make(variant: str) -> training_models.Step:
        model = replace(_trained(given.quick), nf4)
        model.is_loaded_in_4bit = True  # PEFT chooses its layers by this
        options = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear", "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=False).train()
        if variant == "ours":
            reports[variant] = str(fused_mlp.fuse_mlps(model)).splitlines()[0]
        return training_models.Step(model, *((1, 16) if given.quick else TRAINED))

    take_turns = partial(measure.compare, rounds=given.rounds, budget_us=given.seconds * 1e6)
    found = training_models.of_variants(make, ("eager", "ours"), 1 if given.quick else 2, take_turns)
    return {**found, "reports": reports}


def points_of(formats: list[str]) -> list[tuple]:
    """The batch and the format of a decoding step; for QLoRA also its sequences and tokens. transformers' FP8 layers
    are only read on GPUs."""
    kinds = [kind for kind in ("nf4", "fp8-blocks") if kind in formats and (kind == "nf4" or ON_GPU)]
    found = [("decoding", batch, kind) for kind in kinds for batch in BATCHES]
    return found + ([("qlora", *TRAINED, "nf4")] if "nf4" in formats else [])


def figures(part: str, batch: int, *rest: object, fused_mlp, given) -> dict:
    if part == "qlora":
        with torch.enable_grad():
            return qlora(fused_mlp, given)
    return decoding(rest[-1], batch, fused_mlp, given)
