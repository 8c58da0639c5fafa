"""A model spread over devices, as `device_map="auto"` leaves it: fuse it as any other.

Run: `python examples/recipes/inference/device_map.py`
"""

import torch
from accelerate import dispatch_model
from kernels import get_kernel
from transformers import LlamaConfig, LlamaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
count = torch.cuda.device_count()
first, last = (0, count - 1) if count else ("cpu", "cpu")

# Yours: LlamaForCausalLM.from_pretrained("...", dtype=torch.bfloat16, device_map="auto").eval()
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4)
places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first}
places |= {"model.layers.1": last, "model.norm": last, "lm_head": last}
model = dispatch_model(LlamaForCausalLM(config).eval(), places, force_hooks=True)
tokens = torch.randint(3, 512, (2, 16), device=first)

with torch.no_grad():
    expected = model(tokens).logits
    print(fused_mlp.fuse_mlps(model))
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-4)
print("the same logits, fused on", sorted({str(parameter.device) for parameter in model.parameters()}))
