"""Whole models, end to end: time to first token and tokens per second of greedy generation, against the peers.

    python benchmarks/models/generate.py  both dense models, batch 1 and 16
    python benchmarks/models/generate.py --models qwen3-30b-a3b --layers 8 --prompt 128
    python benchmarks/models/generate.py --models gemma-2b --batches 1 --layers 2

The models have the sizes of Gemma 2B, Llama 8B and Qwen3 30B-A3B and random weights; all variants of a model share them
and run interleaved. "eager" runs experts as transformers does by default; a mixture is also measured with its other
experts implementations. Time to first token is the prefill of a prompt; tokens per second cover the decoding after it.
Writes <out>.json (figures and machine facts), and prints a table.
"""

import copy
import importlib.util
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import points
import torch
import transformers
from rich.table import Table
from tqdm import tqdm

import measure

VOCABULARY = 32_000
MODELS = {
    "gemma-2b": transformers.GemmaConfig(
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=18,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=VOCABULARY,
    ),
    "llama-8b": transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
    ),
    "qwen3-30b-a3b": transformers.Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=VOCABULARY,
    ),
    "tiny": transformers.LlamaConfig(  # to try the benchmark itself without a GPU
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    ),
    "tiny-mixture": transformers.Qwen3MoeConfig(
        hidden_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    ),
}
MOST_BATCHED = 256  # tokens at once: batched_mm copies the weights of every choice
LIGER = {"gemma": ("apply_liger_kernel_to_gemma", "geglu"), "llama": ("apply_liger_kernel_to_llama", "swiglu")}


def build(config, layers, device):
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers or config.num_hidden_layers
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # every run decodes the requested number of tokens
    model.generation_config.pad_token_id = 0
    return model.eval()


def twin(model):
    """A second model on the same weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def setups(model, fused_mlp):
    """The ways to run the model, by name: a model and the options of its generate()."""
    fused = twin(model)
    report = fused_mlp.fuse_mlps(fused)
    if report.left or not report.fused:
        sys.exit(f"not every MLP was fused:\n{report}")
    ways = {"eager": (model, {}), "ours": (fused, {})}
    if hasattr(model.config, "num_experts"):
        batched = twin(model)
        batched.set_experts_implementation("batched_mm")
        ways["batched_mm"] = (batched, {})
    if not torch.cuda.is_available():
        return ways  # neither Liger nor transformers' own compilation
    if importlib.util.find_spec("liger_kernel") and model.config.model_type in LIGER:
        import liger_kernel.transformers

        apply, activation = LIGER[model.config.model_type]
        chosen = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": False}
        liger = twin(model)
        getattr(liger_kernel.transformers, apply)(**chosen, **{activation: True}, model=liger)
        ways["liger"] = (liger, {})
    # With a static cache transformers compiles the decoding step, into CUDA graphs.
    for name in ("eager", "batched_mm", "ours"):
        if name in ways:
            compiled = "compile" if name == "eager" else f"{name} + compile"
            ways[compiled] = (twin(ways[name][0]), {"cache_implementation": "static"})
    return ways


def generation_seconds(model, options, prompt, tokens):
    measure.synchronize()
    start = time.perf_counter()
    made = model.generate(prompt, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, **options)
    measure.synchronize()
    seconds = time.perf_counter() - start
    if made.shape[1] != prompt.shape[1] + tokens:
        sys.exit(f"generate() made {made.shape[1] - prompt.shape[1]} tokens instead of {tokens}")
    return seconds


def compare(ways, prompt, tokens, rounds, progress):
    """Figures of every way, interleaved: ttft_ms and tokens_per_second."""

    def turn(model, options):
        first = generation_seconds(model, options, prompt, 1)
        whole = generation_seconds(model, options, prompt, 1 + tokens)
        progress.update()
        return {"ttft_ms": 1e3 * first, "tokens_per_second": len(prompt) * tokens / (whole - first)}

    turns = {name: partial(turn, *way) for name, way in ways.items()}
    measure.in_turns(turns, 1)  # compiles and warms up
    return measure.in_turns(turns, rounds)


def differences(ways, prompt):
    """The distance in norm between the logits of the uncompiled ways and the eager model's."""
    logits = {name: model(prompt).logits.float() for name, (model, options) in ways.items() if not options}
    eager = logits.pop("eager")
    return {name: ((other - eager).norm() / eager.norm()).item() for name, other in logits.items()}


def print_table(results):
    table = Table(title="greedy generation, bfloat16; ratios to eager in the same run")
    for column in ("model", "batch", "set-up", "first token", "gain", "tokens/s", "gain"):
        table.add_column(column, justify="left" if column in ("model", "set-up") else "right", no_wrap=True)
    for result in results:
        eager = result["setups"]["eager"]
        for i, (name, f) in enumerate(result["setups"].items()):
            where = (result["model"], str(result["batch"])) if i == 0 else ("", "")
            first = (f"{f['ttft_ms']:.1f} ms", f"{eager['ttft_ms'] / f['ttft_ms']:.2f}")
            rate = (f"{f['tokens_per_second']:.1f}", f"{f['tokens_per_second'] / eager['tokens_per_second']:.2f}")
            table.add_row(*where, name, *first, *rate)
    points.show(table)


def main():
    parser = points.parser(__doc__, "generate", stored=False, rounds=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gemma-2b", "llama-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode after the first")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--without", nargs="+", default=[], metavar="WORD", help="no set-ups with such a word: compile")
    arguments = parser.parse_args()
    fused_mlp, device, results = points.package(), points.DEVICE, []
    facts = {**measure.machine(), "prompt": arguments.prompt, "tokens": arguments.tokens}
    with torch.inference_mode(), tqdm(unit=" turns", disable=None) as progress:
        for name in arguments.models:
            model = build(MODELS[name], arguments.layers, device)
            ways = setups(model, fused_mlp)
            for batch in arguments.batches:
                prompt = torch.randint(VOCABULARY, (batch, arguments.prompt), device=device)
                fits = prompt.numel() <= MOST_BATCHED
                words = [*arguments.without, *([] if fits else ["batched_mm"])]
                here = {way: setup for way, setup in ways.items() if not any(word in way for word in words)}
                logits = differences(here, prompt[:1])
                figures = compare(here, prompt, arguments.tokens, arguments.rounds, progress)
                layers = model.config.num_hidden_layers
                results.append({"model": name, "layers": layers, "batch": batch, "logits": logits, "setups": figures})
                points.write(
                    {"machine": facts, "results": results}, arguments.out
                )  # keeps the results if a later model fails
            del model, ways
            torch._dynamo.reset()
    print_table(results)
    for name in dict.fromkeys(name for result in results for name in result["logits"]):
        largest = max(result["logits"].get(name, 0.0) for result in results)
        print(f"{name}: logits differ from eager's by {largest:.1e}")


if __name__ == "__main__":
    main()
