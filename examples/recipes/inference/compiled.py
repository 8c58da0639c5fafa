"""torch.compile, and CUDA graphs through it: fuse first, then compile.

Run: `python examples/recipes/inference/compiled.py`
"""

import torch
from kernels import get_kernel
from transformers import GemmaConfig, GemmaForCausalLM

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4, "num_key_value_heads": 1}
config = GemmaConfig(**sizes, head_dim=64, vocab_size=512, num_hidden_layers=2)
model = GemmaForCausalLM(config).eval()
tokens = torch.randint(3, 512, (2, 16))

with torch.inference_mode():
    expected = model(tokens).logits
    print(fused_mlp.fuse_mlps(model))

    # The fused calls are ops in the graph: fullgraph=True proves that none of them breaks it.
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(tokens).logits, expected, rtol=1e-3, atol=1e-3)

    if torch.cuda.is_available():  # CUDA graphs, which remove the host's launches for the whole model
        graphs = torch.compile(model, mode="reduce-overhead")
        for _ in range(3):  # warms up, records, replays
            logits = graphs(tokens).logits
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
print("the same logits compiled")
