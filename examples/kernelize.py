"""`kernels.kernelize`: replaces the forward of a class by a layer of the package, for inference and for training.

The mapping assigns a layer to each name, per device and mode; a class is marked with the name.
"""

import copy

import local_build
import torch
import transformers
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from transformers.models.llama.modeling_llama import LlamaMLP

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = LayerRepository(
    local_build.REPO_ID, layer_name="GatedMLP", revision=f"v{local_build.VERSION}", trust_remote_code=True
)
mapping = {
    "GatedMLP": {device: {Mode.INFERENCE | Mode.TORCH_COMPILE: layer, Mode.TRAINING | Mode.TORCH_COMPILE: layer}}
}

config = transformers.LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4
)
original = transformers.LlamaForCausalLM(config).to(device).eval()
ids = torch.randint(3, 512, (2, 16), device=device)

replace_kernel_forward_from_hub(LlamaMLP, "GatedMLP")
for mode in (Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE):
    model = copy.deepcopy(original).train(Mode.TRAINING in mode)
    with use_kernel_mapping(mapping, inherit_mapping=False):
        # With use_fallback=False a layer without a mapping is an error, which RMSNorm and others would be here.
        kernelize(model, mode=mode, device=device, use_fallback=True)
    call = torch.compile(model, backend="aot_eager") if Mode.TORCH_COMPILE in mode else model
    if Mode.TRAINING in mode:
        original.zero_grad()
        call(ids, labels=ids).loss.backward()
        original(ids, labels=ids).loss.backward()
        gradients = zip(model.parameters(), original.parameters())
        difference = max((one.grad - other.grad).abs().max().item() for one, other in gradients)
    else:
        with torch.no_grad():
            difference = (call(ids).logits - original(ids).logits).abs().max().item()
    print(f"{str(mode).replace('Mode.', ''):24} largest difference {difference:.1e}")
    assert difference < 1e-4
