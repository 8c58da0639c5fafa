"""transformers' ways to put a kernel's layers into a model: KernelConfig, classes replaced at load with their weights
fused, and the names in its own mapping. All run through LOCAL_KERNELS, without the Hub.
"""

import copy

import pytest
import torch
import transformers
from kernels.layer.layer import _validate_layer
from safetensors.torch import load_file
from torch import nn
from transformers import KernelConfig, activations, conversion_mapping, monkey_patching
from transformers.integrations import hub_kernels
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama import modeling_llama
from transformers.utils import kernel_config

import machine
import mixtures
import project
import tiny_models
from safety import assert_same

LLM = tiny_models.GQA | tiny_models.HEAD
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
BERT = tiny_models.LLM | {"type_vocab_size": 2}

MODELS = {
    "Gemma": (transformers.GemmaForCausalLM, transformers.GemmaConfig, LLM),
    "Gemma 2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, LLM),
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLM),
    "Llama with biases": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLM | {"mlp_bias": True}),
    "Phi-3": (transformers.Phi3ForCausalLM, transformers.Phi3Config, LLM),
    "CLIP": (transformers.CLIPTextModelWithProjection, transformers.CLIPTextConfig, tiny_models.LLM),
    "GPT-2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "BERT": (transformers.BertForMaskedLM, transformers.BertConfig, BERT),
}

# The model, its class that is replaced, and the layer whose layout replaces it.
REPLACED = [
    ("Gemma", "GemmaMLP", "GeGLUMLP"),
    ("Gemma", "GemmaMLP", "GatedMLP"),
    ("Gemma", "GemmaMLP", "PackedGatedMLP"),
    ("Gemma 2", "Gemma2MLP", "GeGLUMLP"),
    ("Llama", "LlamaMLP", "SwiGLUMLP"),
    ("Llama", "LlamaMLP", "GeGLUMLP"),  # the activation is still the model's
    ("Llama", "LlamaMLP", "PackedGatedMLP"),
    ("Llama with biases", "LlamaMLP", "GatedMLP"),
    ("Llama with biases", "LlamaMLP", "PackedGatedMLP"),
    ("Phi-3", "Phi3MLP", "PackedGatedMLP"),
    ("CLIP", "CLIPMLP", "MLP"),
]
replaced = pytest.mark.parametrize(("name", "replaced", "layer"), REPLACED, ids=lambda value: value.replace(" ", ""))


@pytest.fixture(autouse=True)
def transformers_as_it_was(monkeypatch, fused_mlp):
    """Undoes the process-wide registration of KernelConfig kernels, and lets a KernelConfig run on any device."""
    monkeypatch.setattr(monkey_patching, "_monkey_patch_mapping_cache", {})
    monkeypatch.setattr(
        conversion_mapping,
        "_checkpoint_conversion_mapping_cache",
        copy.copy(conversion_mapping._build_checkpoint_conversion_mapping()),
    )
    monkeypatch.setattr(
        kernel_config,
        "KERNELS_SUPPORTED_DEVICE_TYPES",
        [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, machine.device_type()],
    )
    yield
    for name in fused_mlp.layers.__all__:
        if "kernel_layer_name" in vars(getattr(fused_mlp.layers, name)):
            del getattr(fused_mlp.layers, name).kernel_layer_name


def ours(layer):
    return f"{project.repo_id()}:{layer}", {"revision": f"v{project.version()}", "trust_remote_code": True}


def config_of(mapping):
    return KernelConfig({name: ours(layer) for name, layer in mapping.items()}, inherit_mapping=False)


def make(name, device):
    """A tiny model whose parameters all affect its output, and inputs."""
    model_class, config_class, options = MODELS[name]
    model = model_class(config_class(**options))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "mlp" in path or "dense" in path:
                parameter.normal_(std=0.2)
    return model.to(device).eval(), torch.randint(3, 64, (2, 9), device=device)


def load(model, folder, **options):
    return type(model).from_pretrained(folder, device_map=model.device.type, **options)


def mlps(model):
    return [module for path, module in model.named_modules() if path.endswith(".mlp")]


def as_logits(model):
    """Gives CLIP's text model, whose result has another name, the interface of the others."""
    if isinstance(model, transformers.CLIPTextModelWithProjection):
        return tiny_models.First(model)
    return model


def assert_same_files(one, other):
    saved, expected = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def assert_same_results(model, other, ids):
    """Compares outputs, and also gradients if the parameters have the same names."""
    model, other = as_logits(model), as_logits(other)
    if [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]:
        assert_same(model, other, ids)
        return
    outputs = [candidate(ids) for candidate in (other, model)]
    outputs = [output if isinstance(output, torch.Tensor) else output.logits for output in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@replaced
def test_a_class_replaced_at_load(fused_mlp, device, tmp_path, name, replaced, layer):
    """A replaced class loads the original's checkpoint, and saves it again with the same weights, bit for bit."""
    model, ids = make(name, device)
    model.save_pretrained(tmp_path / "original")
    kernelized = load(model, tmp_path / "original", use_kernels=True, kernel_config=config_of({replaced: layer}))
    for mlp in mlps(kernelized):
        assert type(mlp) is getattr(fused_mlp.layers, f"{layer}Layout")
        assert mlp.forward.__func__ is getattr(fused_mlp.layers, layer).forward
        assert fused_mlp.explain(mlp).implementation == "fused"
    assert len(mlps(kernelized)) == 2
    assert_same_results(model, kernelized, ids)

    kernelized.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", tmp_path / "original")
    again = load(model, tmp_path / "saved", use_kernels=True, kernel_config=config_of({replaced: layer}))
    assert_same_results(kernelized, again, ids)


@pytest.mark.parametrize("name", ["Llama", "Llama with biases"])
def test_weights_fused_at_load(fused_mlp, device, tmp_path, name):
    """gate_proj and up_proj are loaded as gate_up_proj; after training they are saved separately."""
    model, ids = make(name, device)
    model.save_pretrained(tmp_path / "original")
    config = config_of({"LlamaMLP": "PackedGatedMLP"})
    packed = load(model, tmp_path / "original", use_kernels=True, kernel_config=config)
    for mlp, original in zip(mlps(packed), mlps(model), strict=True):
        expected = torch.cat([original.gate_proj.weight, original.up_proj.weight])
        assert torch.equal(mlp.gate_up_proj.weight, expected)
        assert not hasattr(mlp, "gate_proj")
    for candidate in (packed, model):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1)
        candidate(ids, labels=ids).loss.backward()
        optimizer.step()
    packed.save_pretrained(tmp_path / "trained")
    monkey_patching.clear_patch_mapping()
    conversion_mapping.register_checkpoint_conversion_mapping("llama", [], overwrite=True)
    trained = load(model, tmp_path / "trained")
    assert type(mlps(trained)[0]).__name__ == "LlamaMLP"
    torch.testing.assert_close(trained.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-5)


def test_modes_and_compilation(fused_mlp, device, tmp_path):
    """The mapping is for the mode at load; in the other mode the layout's own forward computes the same."""
    torch.compiler.reset()
    model, ids = make("Gemma", device)
    model.save_pretrained(tmp_path)
    other = load(model, tmp_path, use_kernels=True, kernel_config=config_of({"GemmaMLP": "GeGLUMLP"}))
    for training in (True, False, True):
        assert_same(model.train(training), other.train(training), ids)
    compiled = torch.compile(other.eval(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_later_load_without_kernels(fused_mlp, device, tmp_path):
    """transformers keeps the class replaced in this process, and without kernelize the layout still computes."""
    model, ids = make("Llama", device)
    model.save_pretrained(tmp_path)
    load(model, tmp_path, use_kernels=True, kernel_config=config_of({"LlamaMLP": "PackedGatedMLP"}))
    later = load(model, tmp_path)
    assert type(mlps(later)[0]) is fused_mlp.layers.PackedGatedMLPLayout
    assert_same_results(model, later, ids)


def test_an_activation_that_no_layout_knows(fused_mlp, device, tmp_path, monkeypatch):
    """An unknown activation raises an error at load, so no model silently computes something else."""
    monkeypatch.setattr(modeling_llama, "LlamaMLP", modeling_llama.LlamaMLP)  # after an error the class stays replaced
    config = transformers.LlamaConfig(**LLM, hidden_act="mish")
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mish"):
        load(model, tmp_path, use_kernels=True, kernel_config=config_of({"LlamaMLP": "GatedMLP"}))


@pytest.fixture
def mark(monkeypatch):
    """A function that marks a class until the test ends."""

    def mark(kind, layer_name):
        for attribute, value in (("kernel_layer_name", layer_name), ("kernel_condition", staticmethod(lambda _: True))):
            monkeypatch.setattr(kind, attribute, value, raising=False)

    return mark


def test_a_local_path(fused_mlp, device, mark):
    """A folder may stand in for a repository, for a marked class."""
    model, ids = make("Gemma", device)
    fused = copy.deepcopy(model)
    mark(GemmaMLP, "GeGLUMLP")
    config = KernelConfig({"GeGLUMLP": f"{machine.build_folder().resolve()}:GeGLUMLP"}, use_local_kernel=True)
    fused.set_use_kernels(True, config)
    assert {fused_mlp.explain(mlp).implementation for mlp in mlps(fused)} == {"fused"}
    assert_same(model, fused, ids)


# The names in transformers' own mapping, and the layers that run under them.
GATED_NAMES = [("Gemma", "GeGLUMLP"), ("Llama", "SwiGLUMLP"), ("Llama with biases", "Linear"), ("BERT", "Linear")]
ACTIVATION_NAMES = [
    ("GeluTanh", activations.GELUTanh, "Gemma", "gelu_pytorch_tanh"),
    ("SiLU", activations.SiLUActivation, "Llama", "silu"),
    ("QuickGELU", activations.QuickGELUActivation, "CLIP", "quick_gelu"),
    ("NewGELU", activations.NewGELUActivation, "GPT-2", "gelu_new"),
    ("GeLU", activations.GELUActivation, "BERT", "gelu"),
    ("FastGELU", activations.FastGELUActivation, "BERT", "gelu_fast"),
]


def test_the_names_of_the_default_mapping(fused_mlp):
    """The package has a layer for the name of every MLP, linear layer and activation that transformers maps."""
    theirs = {
        name
        for name, devices in hub_kernels.get_kernel_mapping_transformers().items()
        for modes in devices.values()
        for repository in (modes.values() if isinstance(modes, dict) else [modes])
        if "activation" in str(repository._repo_id) or "liger" in str(repository._repo_id)
    }
    others = {"RMSNorm", "ForCausalLMLoss", "rotary_pos_emb"}
    assert {"GeGLUMLP", "SwiGLUMLP", "Linear", "SiLU", "NewGELU"} <= theirs
    assert theirs - others <= set(fused_mlp.layers.__all__)


@pytest.mark.parametrize(("name", "layer"), GATED_NAMES)
def test_classes_marked_with_the_names(fused_mlp, device, mark, name, layer):
    model, ids = make(name, device)
    kernelized = copy.deepcopy(model)
    kind = nn.Linear if layer == "Linear" else type(mlps(model)[0])
    mark(kind, layer)
    kernelized.set_use_kernels(True, config_of({layer: layer}))
    forwards = [part.forward.__func__ for part in kernelized.modules() if type(part) is kind]
    assert forwards
    assert set(forwards) == {getattr(fused_mlp.layers, layer).forward}
    assert_same(model, kernelized, ids)
    if layer == "Linear":  # does not prevent fusion of the MLP around it
        assert {module.extent for module in fused_mlp.fuse_mlps(kernelized).fused} == {"full"}
        assert_same(model, kernelized, ids)


@pytest.mark.parametrize(("layer", "kind", "name", "activation"), ACTIVATION_NAMES, ids=lambda value: str(value))
def test_activations_by_name(fused_mlp, device, layer, kind, name, activation):
    """Models with activation classes that transformers has marked can be kernelized and then fused."""
    assert kind.kernel_layer_name == layer
    _validate_layer(check_cls=kind, cls=getattr(fused_mlp.layers, layer), repo=None)
    model, ids = make(name, device)
    for module in model.modules():
        for attribute, child in module._modules.items():
            if child in activations.ACT2FN.values() or type(child).__module__ == activations.__name__:
                setattr(module, attribute, activations.ACT2FN[activation])
    kernelized = copy.deepcopy(model)
    kernelized.set_use_kernels(True, config_of({layer: layer}))
    forwards = {part.forward.__func__ for part in kernelized.modules() if type(part) is kind}
    assert forwards == {getattr(fused_mlp.layers, layer).forward}
    assert_same_results(model, kernelized, ids)
    assert {module.extent for module in fused_mlp.fuse_mlps(kernelized).fused} == {"full"}
    assert_same_results(model, kernelized, ids)


def test_the_mixture_of_the_default_mapping(fused_mlp, device):
    """The only mixture that transformers has marked, gpt-oss's, is kernelized."""
    kind = transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP
    layer = fused_mlp.layers.MegaBlocksMoeMLP
    assert kind.kernel_layer_name == "MegaBlocksMoeMLP"
    _validate_layer(check_cls=kind, cls=layer, repo=None)
    model, ids = mixtures.build("gpt_oss").to(device), torch.arange(3, 17, device=device).view(2, 7)
    kernelized = copy.deepcopy(model)
    kernelized.set_use_kernels(True, config_of({"MegaBlocksMoeMLP": "MegaBlocksMoeMLP"}))
    blocks = [part for part in kernelized.modules() if type(part) is kind]
    assert [part.forward.__func__ for part in blocks] == [layer.forward] * 2
    assert fused_mlp.explain(blocks[0]).implementation == "fused"
    assert_same(model, kernelized, ids)
    with pytest.raises(AttributeError, match=r"layers\.MegaBlocksMoeMLP has no weights"):
        layer()(torch.zeros(2, 3, 32, device=device))
    for block in blocks:
        block.experts.to(torch.float64)
        assert "runs unfused: a weight of torch.float64" in fused_mlp.explain(block).reason
