"""Liger and this package in one Trainer: its loss, norms and rotary embedding, and these MLPs.

Run: `python examples/recipes/training/liger.py`

`Trainer.train` puts Liger's kernels into its model, including the MLPs unless configured otherwise. Liger's MLPs can be
fused as well, but only afterwards, by a callback for `on_train_begin`. The log says so.
"""

import copy
import tempfile

import torch
from kernels import get_kernel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

fused_mlp = get_kernel("org/fused-mlp", version=1)

config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
rows = torch.randint(3, 512, (32, 24))
dataset = [{"input_ids": row, "labels": row} for row in rows]
has_gpu = torch.cuda.is_available()  # Liger's kernels need one
kernels = {name: has_gpu for name in ("rope", "rms_norm", "fused_linear_cross_entropy")}


def train(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        options.update(per_device_train_batch_size=8, max_steps=4, report_to=[], save_strategy="no")
        return Trainer(model, TrainingArguments(folder, **options), train_dataset=dataset).train().training_loss


original = copy.deepcopy(model)
print(fused_mlp.fuse_mlps(model))
losses = [train(model, use_liger_kernel=True, liger_kernel_config={"swiglu": False, **kernels}), train(original)]
print(f"training loss {losses[0]:.4f} fused, {losses[1]:.4f} as it was")
assert all(fused_mlp.is_fused(layer.mlp) for layer in model.model.layers)
assert abs(losses[0] - losses[1]) < 1e-2
