"""Training with transformers' Trainer: fuse the model before passing it to the Trainer.

Run: `python examples/recipes/training/trainer.py`

`memory="recompute"` keeps nothing between forward and backward and recomputes the hidden values.
"""

import copy
import tempfile

import torch
from kernels import get_kernel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

fused_mlp = get_kernel("org/fused-mlp", version=1)

config = GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config)
rows = torch.randint(3, 512, (32, 24))
dataset = [{"input_ids": row, "labels": row} for row in rows]


def train(model):
    with tempfile.TemporaryDirectory() as folder:
        options = {"per_device_train_batch_size": 8, "max_steps": 4, "report_to": [], "save_strategy": "no"}
        return Trainer(model, TrainingArguments(folder, **options), train_dataset=dataset).train().training_loss


original = copy.deepcopy(model)
report = fused_mlp.fuse_mlps(model, memory="recompute")
print(report)
losses = [train(model), train(original)]
print(f"training loss {losses[0]:.4f} fused, {losses[1]:.4f} as it was")
assert abs(losses[0] - losses[1]) < 1e-2
report.restore()  # needed before pickling the model; not for save_pretrained and checkpoints
