"""TRL with PEFT: the SFTTrainer adds the adapters, so fuse the trainer's model, then train.

Run: `python examples/recipes/training/sft.py`
"""

import copy
import tempfile

import torch
from datasets import IterableDataset
from kernels import get_kernel
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

fused_mlp = get_kernel("org/fused-mlp", version=1)

config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, "<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
rows = torch.randint(3, 512, (32, 24)).tolist()
dataset = IterableDataset.from_generator(lambda: ({"input_ids": row} for row in rows))


def trainer(model, folder):
    options = {"per_device_train_batch_size": 8, "max_steps": 4, "bf16": False, "report_to": [], "save_strategy": "no"}
    lora = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)  # the same adapters
    data = {"train_dataset": dataset, "processing_class": tokenizer}
    return SFTTrainer(model, SFTConfig(folder, **options), peft_config=lora, **data)


with tempfile.TemporaryDirectory() as folder:
    original, fused = trainer(copy.deepcopy(model), folder), trainer(model, folder)
    print(report := fused_mlp.fuse_mlps(fused.model))
    losses = [each.train().training_loss for each in (fused, original)]
print(f"training loss {losses[0]:.4f} fused, {losses[1]:.4f} as it was")
assert not report.left and abs(losses[0] - losses[1]) < 1e-2
