"""QLoRA: a bitsandbytes NF4 model with PEFT adapters. Quantise, add the adapters, then fuse, then train.

Run: `python examples/recipes/training/qlora.py`

An MLP is one call in each direction. On a CPU bitsandbytes runs it, unless the compiled ops are forced as here.
"""

import copy

import torch
from bitsandbytes.nn import Linear4bit
from kernels import get_kernel
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
device, dtype = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16

config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).to(dtype)
# Does the same as `from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True, ...))`.
for mlp in (layer.mlp for layer in model.model.layers):
    for name, linear in list(mlp.named_children())[:3]:
        quantised = Linear4bit(linear.in_features, linear.out_features, False, dtype, quant_type="nf4")
        quantised.load_state_dict(linear.state_dict())
        setattr(mlp, name, quantised)
model.is_loaded_in_4bit = True
lora = LoraConfig(r=8, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
model = get_peft_model(model.to(device), lora)
tokens = torch.randint(3, 512, (4, 32), device=device)

original = copy.deepcopy(model)
with fused_mlp.backend("cpu" if device == "cpu" else "auto"):
    report = fused_mlp.fuse_mlps(model)
    print(report)
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, original)]
    for loss in losses:
        loss.backward()
print(f"loss {losses[0]:.4f} fused, {losses[1]:.4f} as it was")
assert not report.left and (losses[0] - losses[1]).abs() < 1e-2
