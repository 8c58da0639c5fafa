"""Text generation: fuse the model after loading it, then call `generate` as before.

Run: `python examples/recipes/inference/generate.py`
"""

import torch
from kernels import get_kernel
from transformers import LlamaConfig, LlamaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

# Yours: LlamaForCausalLM.from_pretrained("...", dtype=torch.bfloat16, device_map="auto").eval()
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(3, 512, (2, 16))


def generate():
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)


expected = generate()
report = fused_mlp.fuse_mlps(model)
print(report)
assert torch.equal(generate(), expected)

report.restore()  # restores the model's own methods
assert torch.equal(generate(), expected)
print("the same tokens fused, and restored")
