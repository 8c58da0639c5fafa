"""A diffusers pipeline: fuse its transformer or UNet, which runs once per step; the pipeline stays unchanged.

Run: `python examples/recipes/inference/diffusion.py`
"""

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from kernels import get_kernel

fused_mlp = get_kernel("org/fused-mlp", version=1)

# Yours: DiTPipeline.from_pretrained("...", torch_dtype=torch.bfloat16).to("cuda")
transformer = DiTTransformer2DModel(
    num_attention_heads=4, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=2, sample_size=8
)
pipeline = DiTPipeline(transformer.eval(), AutoencoderKL().eval(), DDIMScheduler())
pipeline.set_progress_bar_config(disable=True)


def generate():
    noise = torch.Generator().manual_seed(0)
    return torch.from_numpy(pipeline([1, 2], generator=noise, num_inference_steps=3, output_type="np").images)


expected = generate()
print(fused_mlp.fuse_mlps(pipeline.transformer))  # pipeline.unet for Stable Diffusion 1.5 and XL
difference = (generate() - expected).abs().max().item()
print(f"largest difference of a pixel in 0 to 1: {difference:.1e}")
assert difference < 1e-3
