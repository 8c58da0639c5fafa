"""Whole steps of models by width, with Liger's modules and torch.compile as peers, for `training.py --steps`."""

from collections.abc import Callable
from types import MethodType

import torch
import transformers
from torch import nn
from training_models import DEVICE, ON_GPU, Step, built, of_variants

VARIANTS = ("eager", "ours", "liger-swiglu", "liger", "liger-loss", "compile", "compile-ours")
_SMALL = {"hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 2, "vocab_size": 512}


def _llama(width: int, hidden: int, layers: int, heads: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": 32_000}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8}
    if not ON_GPU:
        sizes = _SMALL | {"num_attention_heads": 4, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))


def _gpt2() -> nn.Module:
    sizes = {} if ON_GPU else {"n_layer": 2, "vocab_size": 512}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))


def _bert() -> nn.Module:
    sizes = {} if ON_GPU else _SMALL | {"num_attention_heads": 4}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def _vit() -> nn.Module:
    sizes = {} if ON_GPU else _SMALL | {"num_attention_heads": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=1000))


def _tokens(model: nn.Module, sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(model.config.vocab_size, (sequences, tokens), device=DEVICE)
    return {"input_ids": ids, "labels": ids}


def _images(model: nn.Module, images: int, size: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(images, 3, size, size, dtype=model.dtype, device=DEVICE)
    return {"pixel_values": pixels, "labels": torch.randint(1000, (images,), device=DEVICE)}


# The model, the function that makes its batch, and the batch's two sizes: on a GPU, and on a CPU.
STEPS = {
    "llama-1b": (lambda: _llama(2048, 8192, 4, 32), _tokens, (4, 1024), (1, 128)),
    "llama-8b": (lambda: _llama(4096, 14_336, 2, 32), _tokens, (2, 2048), (1, 128)),
    "gpt2": (_gpt2, _tokens, (8, 1024), (1, 128)),
    "bert": (_bert, _tokens, (32, 256), (1, 128)),
    "vit": (_vit, _images, (64, 224), (1, 224)),
}


class BatchStep(Step):
    """A training step on a batch of arbitrary inputs."""

    def __init__(self, model: nn.Module, batch: dict[str, torch.Tensor], run: Callable[..., object]) -> None:
        self.model, self.batch, self.run = model, batch, run
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def forward(self) -> torch.Tensor:
        return self.run(**self.batch).loss


def with_liger(model: nn.Module, norms: bool, loss: bool) -> nn.Module:
    """Replaces a Llama's MLPs, and optionally its norms, by Liger's modules with the same weights; and, optionally, its
    forward by the one that fuses the vocabulary's product with the loss.
    """
    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP
    from liger_kernel.transformers.model.llama import lce_forward

    changed = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaMLP":
                other = LigerSwiGLUMLP(model.config)
            elif norms and type(child).__name__ == "LlamaRMSNorm":
                other = LigerRMSNorm(child.weight.numel(), child.variance_epsilon)
            else:
                continue
            for path, parameter in list(child.named_parameters()):
                owner, _, last = path.rpartition(".")
                setattr(other.get_submodule(owner), last, parameter)
            setattr(module, name, other)
            changed += 1
    if changed == 0:
        raise RuntimeError("no modules of Llama")
    if loss:
        model.forward = MethodType(lce_forward, model)
    return model


def variants_of(name: str, wanted: list[str]) -> list[str]:
    """Drops Liger's variants for all but Llamas on a GPU: it has no other modules."""
    return [variant for variant in wanted if "liger" not in variant or (ON_GPU and name.startswith("llama"))]


def figures(
    name: str, dtype: torch.dtype, fused_mlp, copies: int, variants: list[str], take_turns: Callable[[dict], dict]
) -> dict:
    build, make_batch, on_gpu, on_cpu = STEPS[name]
    sizes = on_gpu if ON_GPU else on_cpu

    def make(variant: str) -> BatchStep:
        model = built(build, dtype)
        torch.manual_seed(0)
        batch = make_batch(model, *sizes)
        if "liger" in variant:
            with_liger(model, norms=variant != "liger-swiglu", loss=variant == "liger-loss")
        if "ours" in variant and not fused_mlp.fuse_mlps(model).fused:
            raise RuntimeError(f"nothing was fused in {name}")
        return BatchStep(model, batch, torch.compile(model) if "compile" in variant else model)

    return {"shape": list(sizes), **of_variants(make, variants_of(name, variants), copies, take_turns)}
