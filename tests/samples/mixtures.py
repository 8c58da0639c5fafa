"""Tiny models with mixtures of experts, for many model types of transformers."""

import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6)
TOP_K = dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2)
GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
MOE = SIZES | EXPERTS | TOP_K | GROUPS

# Multi-head latent attention.
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4}
SPARSE = {"first_k_dense_replace": 1, "mlp_only_layers": []}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}

DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 2}
DBRX |= {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2}}
DBRX |= {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2}}

# Options besides MOE, by model type, and the number of groups of experts that are fused in two layers.
MODELS = {
    "mixtral": ({}, 2),
    "qwen2_moe": ({"mlp_only_layers": []}, 2),
    "qwen3_moe": ({"mlp_only_layers": []}, 2),
    "qwen3_next": (LINEAR | {"mlp_only_layers": []}, 2),
    "qwen3_vl_moe_text": ({"mlp_only_layers": []}, 2),
    "deepseek_v2": (LATENT | SPARSE, 1),
    "deepseek_v3": (LATENT | SPARSE, 1),
    "deepseek_v4": ({}, 2),
    "llama4_text": ({}, 2),
    "gpt_oss": ({}, 2),
    "glm4_moe": (SPARSE, 1),
    "glm4_moe_lite": (LATENT | SPARSE, 1),
    "olmoe": ({}, 2),
    "phimoe": ({}, 2),
    "jetmoe": ({}, 0),
    "granitemoe": ({}, 2),
    "granitemoeshared": ({}, 2),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0}, 2),
    "aria_text": ({}, 2),
    "cohere2_moe": ({}, 2),
    "ernie4_5_moe": ({}, 1),
    "exaone_moe": ({}, 1),
    "flex_olmo": ({}, 2),
    "gemma4_text": (
        {
            "enable_moe_block": True,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "top_k_experts": 2,
        },
        2,
    ),
    "hunyuan_v1_moe": ({}, 2),
    "lfm2_moe": ({"layer_types": ["conv", "full_attention"], "num_dense_layers": 0}, 2),
    "minimax_m2": ({}, 2),
    "nemotron_h": ({"layers_block_type": ["attention", "moe"]}, 1),
    "dots1": (SPARSE, 1),
    "muse_spark_text": ({}, 2),
    "zaya": ({"num_experts_per_tok": 1}, 2),
    "dbrx": (DBRX, 0),
    "minimax_m3_vl_text": ({}, 2),
}


def build(model_type, dtype=torch.float32, **options):
    """A model whose experts affect its outputs, with the same weights every time."""
    config = transformers.AutoConfig.for_model(model_type, **MOE | MODELS[model_type][0] | options)
    torch.manual_seed(1)
    known = type(config) in transformers.AutoModelForCausalLM._model_mapping
    model = (transformers.AutoModelForCausalLM if known else transformers.AutoModel).from_config(config)
    with torch.no_grad():
        for module in groups(model).values():
            for parameter in module.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def groups(model):
    """A model's groups of experts, by path."""
    return {path: module for path, module in model.named_modules() if type(module).__name__.endswith("Experts")}
