"""LoRA with PEFT: add the adapters, then fuse, then train. An MLP's base and adapters are one call in each direction.

Run: `python examples/recipes/training/lora.py`

`lora_dropout` is 0, PEFT's default: on a CPU, PEFT's own layers run while a dropout is active. Saving is PEFT's own.
"""

import copy

import torch
from kernels import get_kernel
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
tokens = torch.randint(3, 512, (4, 32))


def train(model):
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


original = copy.deepcopy(model)
report = fused_mlp.fuse_mlps(model)
print(report)
losses = [train(model), train(original)]
print(f"loss {losses[0]:.4f} fused, {losses[1]:.4f} as it was")
assert not report.left and abs(losses[0] - losses[1]) < 1e-2
with model.disable_adapter(), original.disable_adapter(), torch.no_grad():  # the base model's outputs, fused too
    torch.testing.assert_close(model(tokens).logits, original(tokens).logits, rtol=1e-3, atol=1e-3)
