"""The names that transformers' own kernel mapping uses, served by this package's layers of the same names.

transformers' activations already have these names (NewGELU, GeLU, SiLU ...). Mark a class of MLPs with GeGLUMLP or
SwiGLUMLP, and torch.nn.Linear with Linear.
"""

import copy

import local_build
import torch
import transformers
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

local_build.need_kernels_in_transformers()
device = "cuda" if torch.cuda.is_available() else "cpu"
names = ("GeGLUMLP", "SwiGLUMLP", "Linear", "FastGELU", "GeLU", "GeluTanh", "NewGELU", "QuickGELU", "SiLU")
mapping = {
    name: {
        device: LayerRepository(
            local_build.REPO_ID, layer_name=name, revision=f"v{local_build.VERSION}", trust_remote_code=True
        )
    }
    for name in names
}
replace_kernel_forward_from_hub(GemmaMLP, "GeGLUMLP")
replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
replace_kernel_forward_from_hub(torch.nn.Linear, "Linear")

size = {"vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 1}
llm = size | {"hidden_size": 64, "intermediate_size": 172}
models = [
    transformers.GemmaForCausalLM(transformers.GemmaConfig(**llm, num_key_value_heads=4, head_dim=16)),
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**llm)),
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4)),
    transformers.BertForMaskedLM(transformers.BertConfig(**llm)),
]
for original in models:
    model = copy.deepcopy(original.to(device).eval())
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=device)
    served = {type(part).kernel_layer_name for part in model.modules() if hasattr(type(part), "kernel_layer_name")}
    ids = torch.randint(3, 512, (2, 16), device=device)
    with torch.no_grad():
        difference = (model(ids).logits - original(ids).logits).abs().max().item()
    print(f"{type(model).__name__:18} {', '.join(sorted(served & set(names))):24} largest difference {difference:.1e}")
    assert difference < 1e-4
