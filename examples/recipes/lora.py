"""LoRA with PEFT: add the adapters, then fuse. An MLP whose projections have adapters runs as PEFT wrote it.

Run: `python examples/recipes/lora.py`

With adapters on attention alone all MLPs are fused. With adapters on the MLP merge them for inference, then fuse.
"""

import torch
from kernels import get_kernel
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4)
tokens = torch.randint(3, 512, (2, 16))

on_attention = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj", "v_proj"]))
report = fused_mlp.fuse_mlps(on_attention)
print(report)
assert not report.left
on_attention(input_ids=tokens, labels=tokens).loss.backward()

on_all = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear", init_lora_weights=False))
report = fused_mlp.fuse_mlps(on_all)
print(report)  # says which projections are in the way
assert report.left
report.restore()

merged = on_all.eval().merge_and_unload()
with torch.no_grad():
    expected = merged(tokens).logits
    report = fused_mlp.fuse_mlps(merged)
    print(report)
    assert not report.left
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-3, atol=1e-3)
