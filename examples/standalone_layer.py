"""A standalone layer, built from a config and profiled beside the equivalent MLP."""

import local_build
import torch
import transformers
from kernels import get_kernel
from torch.profiler import ProfilerActivity, profile
from transformers.models.gemma.modeling_gemma import GemmaMLP

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
fused_mlp = get_kernel(local_build.REPO_ID, version=local_build.VERSION, backend=device, trust_remote_code=True)

config = transformers.GemmaConfig(hidden_size=768, intermediate_size=3072)
layer = fused_mlp.layers.GeGLUMLPLayout(config).to(device, dtype)
mlp = GemmaMLP(config).to(device, dtype)
mlp.load_state_dict(layer.state_dict())
x = torch.randn(256, 768, device=device, dtype=dtype)

activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
results = {}
with torch.no_grad():
    for name, module in (("GemmaMLP", mlp), ("GeGLUMLPLayout", layer)):
        module(x)
        with profile(activities=activities) as profiled:
            results[name] = module(x)
        operations = [event.name for event in profiled.events() if event.cpu_parent is None and "::" in event.name]
        print(f"{name:16}", ", ".join(operation.split("::")[-1] for operation in operations))

got, expected = results["GeGLUMLPLayout"].float(), results["GemmaMLP"].float()
difference = ((got - expected).abs().max() / expected.abs().max()).item()
print(f"largest difference {difference:.1e} of the largest output")
assert difference < (1e-4 if dtype == torch.float32 else 3e-2)
