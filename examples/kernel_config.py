"""transformers' `use_kernels=True` with a `KernelConfig`: replaces a model's MLPs while it loads.

`PackedGatedMLP` has its own layout: `gate_proj` and `up_proj` of the checkpoint are loaded into one `gate_up_proj`.
`save_pretrained` writes a checkpoint in the original layout.
"""

import tempfile
from pathlib import Path

import local_build
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import kernel_config

local_build.need_kernels_in_transformers()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":  # transformers 5.22 accepts a KernelConfig only for accelerators; these kernels also run on CPUs
    kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")

config = transformers.LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4
)
original = transformers.LlamaForCausalLM(config).to(device).eval()
ids = torch.randint(3, 512, (2, 16), device=device)

with tempfile.TemporaryDirectory() as folder:
    checkpoint, saved = Path(folder, "checkpoint"), Path(folder, "saved")
    original.save_pretrained(checkpoint)
    layer = (
        f"{local_build.REPO_ID}:PackedGatedMLP",
        {"revision": f"v{local_build.VERSION}", "trust_remote_code": True},
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        checkpoint,
        device_map=device,
        use_kernels=True,
        kernel_config=transformers.KernelConfig({"LlamaMLP": layer}, inherit_mapping=False),
    )
    print(model.model.layers[0].mlp)
    with torch.no_grad():
        difference = (model(ids).logits - original(ids).logits).abs().max().item()

    model.save_pretrained(saved)
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, saved))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

print(f"saved and loaded: {len(after)} tensors, bit for bit the original's")
print(f"largest difference of the logits {difference:.1e}")
assert difference < 1e-4
