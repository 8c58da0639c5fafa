"""Whole training steps of two models: unfused, and fused with each choice of what autograd saves."""

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterable

import points
import torch
import transformers
from points import DEVICE, ON_GPU
from torch import nn

import measure

VARIANTS = {"eager": None, "ours": "activations", "ours-recompute": "recompute"}


def llama() -> nn.Module:
    """Four layers with the widths of Llama 8B; on a CPU, two small ones."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 4, "vocab_size": 32_000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    if not ON_GPU:
        sizes = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 2, "vocab_size": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


def gpt2() -> nn.Module:
    """GPT-2; on a CPU, two layers of it. Dropout is off, as it would keep the parts of an MLP from being fused."""
    sizes = {} if ON_GPU else {"n_layer": 2, "vocab_size": 512}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, use_cache=False))


# The model, the sequences of a batch and the tokens of a sequence.
MODELS = {
    "llama": (llama, 4 if ON_GPU else 1, 2048 if ON_GPU else 64),
    "gpt2": (gpt2, 8 if ON_GPU else 1, 1024 if ON_GPU else 64),
}


def built(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A new instance in training mode, with the same weights every time."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return build().train()
    finally:
        torch.set_default_dtype(default)


class Step:
    """A training step of a model with an optimizer and a batch; the forward runs in autocast if a dtype is given."""

    def __init__(self, model: nn.Module, sequences: int, tokens: int, autocast: torch.dtype | None = None) -> None:
        self.model, self.autocast = model, autocast
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self.ids = torch.randint(model.config.vocab_size, (sequences, tokens), device=DEVICE)

    def forward(self) -> torch.Tensor:
        with torch.autocast(DEVICE, self.autocast, enabled=self.autocast is not None):
            return self.model(input_ids=self.ids, labels=self.ids).loss

    def __call__(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def of_variants(
    make: Callable[[str], Step], variants: Iterable[str], copies: int, take_turns: Callable[[dict], dict]
) -> dict[str, dict]:
    """The medians of each variant's figures over new instances, which `take_turns` measures interleaved, and the
    reasons for omitted variants.
    """
    steps: dict[tuple[str, int], Step] = {}
    memory, first, left = {}, {}, {}
    for copy in range(copies):
        for variant in variants:
            with contextlib.nullcontext() if variant == "eager" else points.noting(left, variant):
                step = make(variant)
                first[variant] = step().item()  # the optimizer's state exists from here on
                if not abs(first[variant] - first["eager"]) <= 1e-2 * abs(first["eager"]):
                    raise RuntimeError(f"a loss of {first[variant]}, eager's is {first['eager']}")
                memory[variant] = measure.saved_and_peak(step.forward, torch.Tensor.backward)
                step.optimizer.zero_grad()
                steps[variant, copy] = step
    steps = {key: step for key, step in steps.items() if key[0] not in left}
    taken = take_turns(steps)
    found = {}
    for variant in dict.fromkeys(variant for variant, _ in steps):
        of_copies = [taken[variant, copy] for copy in range(copies)]
        found[variant] = {key: statistics.median(each[key] for each in of_copies) for key in of_copies[0]}
        walls = [each["wall_us"] for each in of_copies]
        found[variant] |= {"low": min(walls), "high": max(walls)}
    points.with_memory(found, {variant: memory[variant] for variant in found})
    del steps, step
    gc.collect()
    return {"providers": found, "left": left}


def figures(name: str, dtype: torch.dtype, fused_mlp, copies: int, take_turns: Callable[[dict], dict]) -> dict:
    build, sequences, tokens = MODELS[name]

    def make(variant: str) -> Step:
        model = built(build, dtype)
        memory = VARIANTS[variant]
        if memory is not None and not fused_mlp.fuse_mlps(model, memory=memory).fused:
            raise RuntimeError(f"nothing was fused in {name}")
        return Step(model, sequences, tokens)

    return {"shape": [sequences, tokens], **of_variants(make, VARIANTS, copies, take_turns)}
