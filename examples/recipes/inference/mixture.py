"""A mixture of experts: `fuse_mlps` also fuses the experts; or select them by name in transformers.

Run: `python examples/recipes/inference/mixture.py`
"""

import torch
from kernels import get_kernel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
sizes |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()
tokens = torch.randint(3, 512, (2, 16))

with torch.no_grad():
    expected = model(tokens).logits
    report = fused_mlp.fuse_mlps(model)  # all experts of a layer are one call
    print(report)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    report.restore()

    fused_mlp.register_experts()  # then from_pretrained also accepts experts_implementation="fused_mlp"
    model.set_experts_implementation("fused_mlp")
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    print(fused_mlp.explain(model))
