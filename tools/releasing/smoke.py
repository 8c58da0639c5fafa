"""A user's first steps: load the kernel from the Hub, fuse a model's MLPs, and check that the result is the same.

Run by its path in its own process, which knows the Hub's address and nothing of this tree.
"""

import sys

import torch
import transformers
from kernels import get_kernel, get_loaded_kernels

REPO_ID, VERSION = sys.argv[1], int(sys.argv[2])
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

device = "cuda" if torch.cuda.is_available() else "cpu"
fused_mlp = get_kernel(REPO_ID, version=VERSION, backend=device, trust_remote_code=[REPO_ID])  # our own repository
(loaded,) = get_loaded_kernels()
print(f"loaded {REPO_ID} version {loaded.metadata.version}, commit {loaded.repo_info.revision}")
for name in ("Llama", "Gemma"):
    config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(device)
    ids = torch.randint(SIZES["vocab_size"], (2, 16), device=device)
    with torch.no_grad():
        expected = model(ids).logits
        report = fused_mlp.fuse_mlps(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            logits = model(ids).logits
    torch.testing.assert_close(logits, expected)
    if len(report.fused) != SIZES["num_hidden_layers"]:
        sys.exit(f"error: of {name}'s MLPs not all were fused:\n{report}")
    ran = sum(event.name.startswith(f"{fused_mlp.__name__}::") for event in profiled.events())
    if ran < SIZES["num_hidden_layers"]:  # a fallback to PyTorch would match PyTorch in every case
        sys.exit(f"error: the compiled ops of the build have run {ran} times in {name}:\n{report}")
    difference = (logits - expected).abs().max()
    print(f"{name}: {len(report.fused)} MLPs fused, {ran} compiled ops, largest difference {difference:.1e}")
