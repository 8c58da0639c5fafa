"""Quantised weights for inference: quantise, then fuse. The report names layers that still run their library's code.

Run: `python examples/recipes/inference/quantised.py`

On a GPU, kernels read int8 of torchao and bitsandbytes, and FP8 of torchao and transformers. On a CPU such layers run
their library's code, unless the compiled ops are forced as here.
"""

import torch
from kernels import get_kernel
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
device = "cuda" if torch.cuda.is_available() else "cpu"

config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
tokens = torch.randint(3, 512, (2, 16), device=device)
# The first MLP is quantised, the second is not.
quantize_(model.model.layers[0].mlp, Int8WeightOnlyConfig())

with torch.no_grad(), fused_mlp.backend("cpu" if device == "cpu" else "auto"):
    expected = model(tokens).logits
    report = fused_mlp.fuse_mlps(model)
    print(report)
    assert all(fused_mlp.is_fused(layer.mlp) for layer in model.model.layers) and not report.left
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0.05, atol=0.05)
    print(fused_mlp.explain(model.model.layers[0].mlp))
