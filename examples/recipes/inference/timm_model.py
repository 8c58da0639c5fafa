"""A model of timm: fuse it once it is created. Transforms, heads and checkpoints stay as they are.

Run: `python examples/recipes/inference/timm_model.py`

It needs timm, and a torchvision that fits the installed PyTorch.
"""

import timm
import torch
from kernels import get_kernel

fused_mlp = get_kernel("org/fused-mlp", version=1)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

# Yours: timm.create_model("...", pretrained=True).eval().to("cuda", torch.bfloat16)
model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10).eval()
torch.nn.init.normal_(model.head.weight)  # timm's are so small that all answers look alike
images = torch.randn(2, 3, 224, 224)

with torch.inference_mode():
    expected = model(images)
    print(fused_mlp.fuse_mlps(model))  # residual sums included
    torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-3)
print("the same logits fused")
