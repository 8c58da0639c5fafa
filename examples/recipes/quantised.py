"""Quantised models: what is quantised runs as its library wrote it, and the report says so.

Run: `python examples/recipes/quantised.py`

Projections that the quantiser leaves in 16 or 32 bit are fused where they make up a whole MLP.
"""

import torch
from kernels import get_kernel
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(3, 512, (2, 16))
# The MLP of the first layer is quantised, that of the second is not.
quantize_(model.model.layers[0].mlp, Int8WeightOnlyConfig())

with torch.no_grad():
    expected = model(tokens).logits
    report = fused_mlp.fuse_mlps(model)
    print(report)
    assert [module.fused for module in report.modules] == [False, True]
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-3)
print(fused_mlp.explain(model.model.layers[0].mlp))
