"""PEFT's adapters on fused models: on the projections, on the whole MLP, on bare parameters."""

import peft
import pytest
import torch

from safety import alike, assert_same, fuse, llama, pair, states, ways

PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]

# Adapter options; no adapter starts as the identity.
ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False),
    "LoRA on one": lambda: peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False, use_dora=True),
    "LoRA with dropout": lambda: peft.LoraConfig(
        r=4, target_modules=PROJECTIONS, init_lora_weights=False, lora_dropout=0.5
    ),
    "LoRA on parameters": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.gate_proj.weight"], init_lora_weights=False
    ),
    "IA3": lambda: peft.IA3Config(
        target_modules=["up_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "OFT": lambda: peft.OFTConfig(target_modules=["up_proj"], oft_block_size=4, init_weights=False),
    "VeRA": lambda: peft.VeraConfig(target_modules=["up_proj"], r=4, init_weights=False),
    "LoHa": lambda: peft.LoHaConfig(target_modules=["up_proj"], r=4, init_weights=False),
    "trained MLP": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["mlp"]),
}
adapters = pytest.mark.parametrize("adapter", ADAPTERS)


def adapted(model, adapter):
    model = peft.get_peft_model(model, ADAPTERS[adapter]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@ways
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@adapters
def test_attached_after(fused_mlp, device, way, adapter, training):
    model, ids = llama(device)
    with torch.no_grad():
        before = model(ids).logits
    model, fused = alike(lambda model: adapted(model, adapter).train(training), *pair(fused_mlp, way, model))
    assert not torch.allclose(model(ids).logits, before, atol=1e-3)
    assert_same(model, fused, ids)


@ways
@adapters
def test_attached_before(fused_mlp, device, way, adapter):
    model, ids = llama(device)
    model, fused = alike(lambda model: adapted(model, adapter), model, llama(device)[0])
    fused.load_state_dict(model.state_dict())
    fuse(fused_mlp, way, fused)
    assert_same(model, fused, ids)


def test_the_report_names_the_adapter(fused_mlp, device):
    model = adapted(llama(device)[0], "LoRA on one")
    report = fused_mlp.fuse_mlps(model)
    assert not report.left
    assert {module.pattern for module in report.fused} == {"gated with LoRA of rank 4"}
    assert states(fused_mlp, model) == {"fused"}


@ways
def test_an_adapter_attached_to_a_compiled_model(fused_mlp, device, way):
    torch.compiler.reset()
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)
    compiled = torch.compile(fused, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
        alike(lambda model: adapted(model, "LoRA"), model, fused)  # adds the adapter in place
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
