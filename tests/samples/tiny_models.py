"""Tiny models of transformers, their inputs, and their outcomes."""

import torch
import transformers

LLM = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = LLM | {"num_key_value_heads": 2}
HEAD = {"head_dim": 8}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 88, "num_layers": 2, "num_heads": 4}
IMAGES = {name: LLM[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
IMAGES |= {"image_size": 16, "patch_size": 8}

# Model, configuration, and the expected fusion: the class of its MLPs, their number, the pattern.
MODELS = {
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", GQA | HEAD, ("GemmaMLP", 2, "gated")),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GQA | HEAD, ("Gemma2MLP", 2, "gated")),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GQA | {"mlp_bias": True}, ("LlamaMLP", 2, "gated")),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GQA, ("Qwen2MLP", 2, "gated")),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GQA | HEAD, ("MistralMLP", 2, "gated")),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", GQA, ("Phi3MLP", 2, "packed gated")),
    "GLM": ("GlmForCausalLM", "GlmConfig", GQA | HEAD, ("GlmMLP", 2, "packed gated")),
    "Phi": ("PhiForCausalLM", "PhiConfig", LLM, ("PhiMLP", 2, "plain")),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LLM, ("GPTNeoXMLP", 2, "plain")),
    "Starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", GQA, ("Starcoder2MLP", 2, "plain")),
    "Nemotron": ("NemotronForCausalLM", "NemotronConfig", GQA | HEAD, ("NemotronMLP", 2, "plain")),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        ("GPT2MLP", 2, "plain"),
    ),
    "CLIP text": ("CLIPTextModel", "CLIPTextConfig", LLM, ("CLIPMLP", 2, "plain")),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", IMAGES, ("SiglipMLP", 3, "plain")),
    "ViT": ("ViTModel", "ViTConfig", IMAGES, ("ViTMLP", 2, "plain")),
    "BERT": ("BertModel", "BertConfig", LLM, ("BertLayer", 2, "plain in two modules")),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 88, "n_layers": 2, "n_heads": 4},
        ("FFN", 2, "plain"),
    ),
    "T5": ("T5EncoderModel", "T5Config", T5, ("T5DenseActDense", 2, "plain")),
    "T5 gated": (
        "T5EncoderModel",
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu"},
        ("T5DenseGatedActDense", 2, "gated"),
    ),
}


def build(name, device, dtype=torch.float32):
    """A tiny model and its inputs."""
    model_class, config_class, options, _ = MODELS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    with torch.no_grad():  # many biases start as zeros
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if "pixel" in model.main_input_name:
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16, device=device, dtype=dtype)}
    else:
        inputs = {"input_ids": torch.randint(3, 64, (2, 9), device=device)}
    return model.to(device, dtype).eval(), inputs


def outcome(model, inputs):
    """The first output, and the gradients of all parameters."""
    model.zero_grad()
    output = model(**inputs)[0]
    output.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return output.detach(), {name: gradient for name, gradient in gradients.items() if gradient is not None}


class First(torch.nn.Module):
    """A model of transformers that returns only the first of its results, a tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)[0]
