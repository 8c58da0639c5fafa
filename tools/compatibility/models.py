"""Tests on transformers models what the package does on its own.

Run by its path in its own process: `models.py <repo id> <version> <backend>`. Prints one JSON object: None for each
test that passed, or the error; and the `kernels` version that transformers requires, or None if the installed one fits.
"""

import json
import sys

import torch
import transformers
from kernels import get_kernel
from transformers.utils import import_utils

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def fuse_mlps(fused_mlp) -> str | None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).eval()
    return difference(model, lambda: len(fused_mlp.fuse_mlps(model).fused) == SIZES["num_hidden_layers"])


def register_experts(fused_mlp) -> str | None:
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS)).eval()

    def change() -> bool:
        fused_mlp.register_experts()
        model.set_experts_implementation("fused_mlp")
        return model.config._experts_implementation == "fused_mlp"

    return difference(model, change)


def difference(model, change) -> str | None:
    ids = torch.randint(3, SIZES["vocab_size"], (2, 8))
    try:
        with torch.no_grad():
            expected = model(ids).logits
            if not change():
                return "did nothing"
            torch.testing.assert_close(model(ids).logits, expected)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def main() -> None:
    repo_id, version, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    fused_mlp = get_kernel(repo_id, version=version, backend=backend)
    wants = None if import_utils.is_kernels_available() else f"{import_utils.KERNELS_MIN_VERSION} or later"
    found = {trial.__name__: trial(fused_mlp) for trial in (fuse_mlps, register_experts)}
    print(json.dumps({"wants": wants, **found}))


if __name__ == "__main__":
    main()
