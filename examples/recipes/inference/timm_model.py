"""A timm model: fuse it after creating it. Transforms, heads and checkpoints stay unchanged.

Run: `python examples/recipes/inference/timm_model.py`

Needs timm, and a torchvision that matches the installed PyTorch.
"""

import timm
import torch
from kernels import get_kernel

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

# Yours: timm.create_model("...", pretrained=True).eval().to("cuda", torch.bfloat16)
model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10).eval()
torch.nn.init.normal_(model.head.weight)  # timm's values are so small that all outputs look alike
images = torch.randn(2, 3, 224, 224)

with torch.inference_mode():
    expected = model(images)
    print(fused_mlp.fuse_mlps(model))  # residual sums included
    torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-3)
print("the same logits fused")
