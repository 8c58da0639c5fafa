"""Models with bitsandbytes' four-bit layers, with and without PEFT adapters, fused and not.

On a CPU such layers are left to bitsandbytes unless the compiled ops are forced, as here. bitsandbytes' own code
decodes weights there as ours does only in training: for inference it repacks them with bfloat16 scales.
"""

import contextlib
import copy
import functools
import importlib
import importlib.metadata
import sys

import peft
import pytest
import torch
import transformers
from torch import nn

import machine
from modules import Gated, Plain
from safety import alike, assert_close
from safety import run_with_gradients as run
from tiny_models import LLM

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes does not load on this machine", exc_type=ImportError)
importlib.import_module("peft.tuners.lora.bnb")  # PEFT imports it when it first meets a layer of bitsandbytes

WIDE = LLM | {"hidden_size": 64, "intermediate_size": 256}
# Model, configuration, its options, the pattern, and the names of the projections.
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {"mlp_bias": True}, "gated", ["gate_proj", "up_proj", "down_proj"]),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", {}, "packed gated", ["gate_up_proj", "down_proj"]),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}, "plain", ["dense_h_to_4h", "dense_4h_to_h"]),
    "BERT": (
        *("BertModel", "BertConfig", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
        *("plain in two modules", r".*layer\.\d+\.(intermediate|output)\.dense"),
    ),
}
MLPS = 2
kinds = pytest.mark.parametrize("kind", MODELS)
nestings = pytest.mark.parametrize("nested", [False, True], ids=["scales", "nested scales"])


@pytest.fixture(autouse=True)
def forced(fused_mlp):
    with fused_mlp.backend(machine.device_type()) if machine.device_type() == "cpu" else contextlib.nullcontext():
        yield


@pytest.fixture
def ops(fused_mlp, monkeypatch, dispatched):
    """Records op calls on quantised weights, as `counted` names them; test_quantized_guards.py covers compiled code."""
    return counted(fused_mlp, monkeypatch)


def counted(fused_mlp, monkeypatch):
    """A list of all later op calls: "packed" if weights are read as they are, "forward" and "backward" if decoded."""
    adapters, quantized = (sys.modules[f"{fused_mlp.__name__}.{name}"] for name in ("adapters", "quantized.weights"))
    called, run, over_packed = [], quantized.run, adapters._over_packed

    def spy(op, *rest):
        called.append("forward" if op is adapters._plain_forward else "backward")
        return over_packed(op, *rest)

    monkeypatch.setattr(quantized, "run", lambda *given: (called.append("packed"), run(*given))[1])
    monkeypatch.setattr(adapters, "_over_packed", spy)
    return called


def layer_4bit(source, dtype, nested=False, format="nf4"):
    options = {"compute_dtype": dtype, "compress_statistics": nested, "quant_type": format}
    made = bnb.nn.Linear4bit(source.in_features, source.out_features, source.bias is not None, **options)
    made.load_state_dict(source.state_dict())
    if source.bias is not None:
        made.bias.data = made.bias.data.to(dtype)
    return made.to(source.weight.device)


def is_of_mlp(name):
    return not any(word in name for word in ("attention", "attn", "pooler"))


def quantise(model, *rest, only=is_of_mlp, **options):
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "head" not in name and only(name):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer_4bit(layer, *rest, **options))
    model.is_loaded_in_4bit = True  # PEFT chooses its layers by this
    return model


def decoded(fused_mlp, model):
    """A copy of the model with plain layers that hold the decoded weights."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = fused_mlp.QuantizedWeight.from_bitsandbytes(layer.weight).dequantize(layer.compute_dtype)
            made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, weight.device, weight.dtype)
            made.weight.data = weight
            if layer.bias is not None:
                made.bias.data = layer.bias.data
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made)
    return model


def build(kind, device, dtype=None, nested=False, adapted=False, everything=False, **options):
    """A model in training mode without dropout, and its inputs."""
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    name, config, own, _, projections = MODELS[kind]
    model = getattr(transformers, name)(getattr(transformers, config)(**WIDE | own))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    only = {"only": lambda name: True} if everything else {}
    model = quantise(model.to(device, dtype), dtype, nested, **only).requires_grad_(False)
    if adapted:
        options = {"r": 4, "target_modules": projections, "init_lora_weights": False, **options}
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
        model.enable_input_require_grads()
    return model.train(), {"input_ids": torch.randint(3, 64, (2, 9), device=device)}


def pair(fused_mlp, *rest, **options):
    model, inputs = build(*rest, **options)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused, verify=False)
    return model, fused, inputs


def tolerance(device):
    """On a GPU, gradients of adapters are rounded to bfloat16 in different places: in some 300 draws three differed by
    0.063 to 0.070 of their largest value."""
    return 1e-4 if device.type == "cpu" else 0.1


def assert_same(model, fused, inputs, **options):
    device = next(model.parameters()).device
    assert_close(run(fused, inputs, **options), run(model, inputs, **options), tolerance(device))


def layers_in(model):
    return [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]


# Values and gradients.


@nestings
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@kinds
def test_values(fused_mlp, device, ops, kind, training, nested):
    model, fused, inputs = pair(fused_mlp, kind, device, nested=nested)
    assert fused_mlp.explain(fused).implementation == "fused"
    plain = decoded(fused_mlp, model)
    alike(lambda model: model.train(training), plain, fused)
    with torch.no_grad():
        assert_close(run(fused, inputs), run(plain, inputs), tolerance(device))
    assert ops == ["forward" if training else "packed"] * MLPS


@kinds
def test_as_bitsandbytes(fused_mlp, device, ops, kind):
    model, fused, inputs = pair(fused_mlp, kind, device)
    with torch.no_grad():
        assert_close(run(fused, inputs), run(model, inputs), tolerance(device))
    assert ops == ["forward"] * MLPS


@pytest.mark.parametrize("memory", ["activations", "recompute"])
@nestings
@kinds
def test_adapters(fused_mlp, device, ops, kind, nested, memory):
    """With QLoRA, gradients of the adapters and of all that precedes them match the unfused model's."""
    model, fused, inputs = pair(fused_mlp, kind, device, nested=nested, adapted=True)
    report = fused_mlp.fuse_mlps(fused, memory=memory, verify=False)
    assert not report.left
    assert f"{MODELS[kind][3]} in nf4 with LoRA of rank 4" in {module.pattern for module in report.fused}
    assert_same(model, fused, inputs)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS


def test_frozen(fused_mlp, device, ops):
    """Without adapters, gradients flow through frozen weights to the embeddings."""
    model, fused, inputs = pair(fused_mlp, "Llama", device)
    for each in (model, fused):
        each.get_input_embeddings().requires_grad_(True)
    assert_same(model, fused, inputs)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS


@pytest.mark.parametrize("adapted", [False, True])
def test_autocast(fused_mlp, device, ops, adapted):
    """Layers cast x to bfloat16 if autocast does so for the adapters; the result is float32."""
    model, inputs = build("Llama", device, torch.float32, adapted=adapted)
    for layer in layers_in(model):
        layer.compute_dtype = torch.bfloat16
        layer.bias = None
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused, verify=False)
    found = run(fused, inputs, autocast=torch.bfloat16)
    assert_close(found, run(model, inputs, autocast=torch.bfloat16), 6e-2)
    assert ops[:MLPS] == ["forward" if adapted else "packed"] * MLPS
    other = run(fused, inputs, autocast=torch.float16)
    assert len(ops) == (2 * MLPS if adapted else MLPS)  # with a dtype other than autocast's, the layer is called
    assert all(output.isfinite().all() for output in (other[0] if isinstance(other[0], list) else other[:1]))


def test_another_dtype(fused_mlp, device, ops):
    """Without adapters, x is cast to the compute dtype and the result back."""
    model, inputs = build("Llama", device, torch.float32)
    for layer in layers_in(model):
        layer.compute_dtype = torch.bfloat16
        layer.bias = None
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused, verify=False)
    assert_close(run(fused, inputs), run(model, inputs), 6e-2)
    assert ops == ["packed"] * MLPS


def test_a_mixture(fused_mlp, device, ops):
    """An MLP with one plain, trained projection among quantised ones is fused."""
    model, inputs = build("Llama", device, adapted=False)
    plain = decoded(fused_mlp, model)
    for path in (f"model.layers.{layer}.mlp" for layer in range(MLPS)):
        model.get_submodule(path).up_proj = plain.get_submodule(path).up_proj.requires_grad_(True)
    fused = copy.deepcopy(model)
    assert not fused_mlp.fuse_mlps(fused, verify=False).left
    assert_same(model, fused, inputs)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS


@pytest.fixture
def small_layers(fused_mlp, monkeypatch):
    """Fuses standalone layers of any size, on a CPU too."""
    running = importlib.import_module(f"{fused_mlp.__name__}.models.running.adapted")
    monkeypatch.setattr(running, "_LEAST_ELEMENTS", 0)
    monkeypatch.setattr(running, "_LEAST_WEIGHTS", 0)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_layers_alone(fused_mlp, device, ops, training, small_layers):
    """Attention projections are fused with their adapters as one op each."""
    options = {"adapted": True, "everything": True, "target_modules": ["q_proj", "o_proj"]}
    model, fused, inputs = pair(fused_mlp, "Llama", device, **options)
    assert fused_mlp.explain(fused.base_model.model.model.layers[0].self_attn.q_proj).implementation == "fused"
    patterns = [module.pattern for module in fused_mlp.fuse_mlps(fused).fused]
    assert patterns.count("linear in nf4 with LoRA of rank 4") == patterns.count("linear in nf4") == 2 * 2  # k, v
    with torch.set_grad_enabled(training):
        assert_same(model, fused, inputs)
    assert ops.count("backward") == (2 * 2 + MLPS if training else 0)


def test_layers_alone_without_adapters(fused_mlp, device, ops, small_layers):
    """Attention projections run as one op each in inference, and as bitsandbytes' own under autograd."""
    model, fused, inputs = pair(fused_mlp, "Llama", device, everything=True)
    layer = fused.model.layers[0].self_attn.q_proj
    assert [part.pattern for part in fused_mlp.explain(layer).parts] == ["linear in nf4"]
    plain = decoded(fused_mlp, model)
    alike(lambda each: each.eval(), model, fused, plain)
    with torch.no_grad():
        assert_close(run(fused, inputs), run(plain, inputs), tolerance(device))
        assert ops == ["packed"] * (4 + 1) * MLPS
        ops.clear()
        other = layer_4bit(nn.Linear(64, 64, device=device), layer.compute_dtype, format="fp4")
        layer.weight, x = other.weight, torch.randn(3, 64, device=device, dtype=layer.compute_dtype)
        wanted = x @ fused_mlp.QuantizedWeight.from_bitsandbytes(layer.weight).dequantize(x.dtype).t()
        assert_close([layer(x)], [wanted if layer.bias is None else wanted + layer.bias], tolerance(device))
        assert ops == ["packed"]
        layer.register_forward_pre_hook(lambda module, given: None)  # bitsandbytes' own forward runs
        layer(x)
        assert ops == ["packed"]
    model, fused, inputs = pair(fused_mlp, "Llama", device, everything=True)
    for each in (model, fused):
        each.get_input_embeddings().requires_grad_(True)
    ops.clear()
    assert_same(model, fused, inputs)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS


# Guards.


def other_state(layer):
    """Puts other values in the same parameter."""
    other = layer_4bit(nn.Linear(64, 256, device=layer.weight.device), layer.compute_dtype)
    layer.weight.data, layer.weight.quant_state = other.weight.data, other.weight.quant_state


def other_weight(layer):
    layer.weight = layer_4bit(nn.Linear(64, 256, device=layer.weight.device), layer.compute_dtype, format="fp4").weight


def other_offset(layer):
    layer.weight.quant_state.offset.add_(0.5)


def other_forward(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2


def other_bias(layer):
    layer.bias.data = layer.bias.data.to(torch.float16)


def lost_state(layer):
    """Leaves the parameter as FSDP does: the layer restores its state at the next call."""
    layer.quant_state, layer.weight.quant_state = layer.weight.quant_state, None


def without_dtype(layer):
    layer.compute_dtype, layer.compute_type_is_set = None, False


# The change to the first projection, and whether the MLP is fused at the next call and at the one after.
CHANGES = {
    "state": (other_state, True, True),
    "weight": (other_weight, True, True),
    "offset": (other_offset, True, True),
    "hook": (lambda layer: layer.register_forward_hook(lambda module, given, output: output * 2), False, False),
    "forward": (other_forward, False, False),
    "bias": (other_bias, False, True),  # the layer casts it
    "lost": (lost_state, False, True),
    "dtype": (without_dtype, False, True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(fused_mlp, device, ops, change):
    model, fused, inputs = pair(fused_mlp, "Llama", device, nested=True)
    with torch.no_grad():
        before = run(fused, inputs)[0][0]
        function, *are_fused = CHANGES[change]
        alike(lambda model: function(model.model.layers[0].mlp.gate_proj), model, fused)
        for is_fused in are_fused:
            ops.clear()
            got = run(fused, inputs)
            assert ops.count("forward") == MLPS - 1 + is_fused
            assert_close(got, run(model, inputs), tolerance(device))
    assert change in ("bias", "lost", "dtype") or not torch.allclose(got[0][0], before, atol=1e-3)


def test_decoded_layers(fused_mlp, device):
    """After a fused model's layers are replaced by plain ones, as by `model.dequantize()`, it is still fused."""
    model, fused, inputs = pair(fused_mlp, "Llama", device)
    model, fused = decoded(fused_mlp, model), decoded(fused_mlp, fused)
    assert "in nf4" not in {part.pattern for part in fused_mlp.explain(fused).parts}
    assert fused_mlp.explain(fused).implementation == "fused"
    assert_same(model, fused, inputs)


def test_merged_and_disabled(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, "Llama", device, adapted=True)
    for each in (model, fused):
        each.requires_grad_(False)
    with torch.no_grad():
        for step in ("merge_adapter", "unmerge_adapter"):
            with pytest.warns(UserWarning, match="rge lora module to 4-bit"):
                alike(lambda model, step=step: getattr(model, step)(), model, fused)
            ops.clear()
            assert_same(model, fused, inputs)
            assert step != "merge_adapter" or ops == ["forward"] * MLPS
        with model.disable_adapter(), fused.disable_adapter():
            ops.clear()
            assert_same(model, fused, inputs)
            assert ops == ["forward"] * MLPS


@pytest.mark.parametrize(
    "options, words",
    [({"use_dora": True}, "of an unsupported variant"), ({"lora_dropout": 0.5}, None)],
    ids=["DoRA", "dropout"],
)
def test_other_adapters_are_left(fused_mlp, device, ops, options, words):
    model, fused, inputs = pair(fused_mlp, "Llama", device, adapted=True, **options)
    if words is not None:
        assert words in fused_mlp.explain(fused).reason
    assert_same(model, fused, inputs)
    assert ops == [] or (words is None and device.type == "cuda")  # the op draws the same dropout mask as PyTorch


@pytest.mark.parametrize("owner, method", [("layer", "forward"), ("package", "matmul_4bit"), ("peft", "forward")])
def test_patched_methods_are_left(fused_mlp, device, ops, monkeypatch, owner, method):
    owner = {"layer": bnb.nn.Linear4bit, "package": bnb, "peft": peft.tuners.lora.bnb.Linear4bit}[owner]
    model, fused, inputs = pair(fused_mlp, "Llama", device, adapted=owner is peft.tuners.lora.bnb.Linear4bit)
    original, called = getattr(owner, method), []
    around = functools.wraps(original)(lambda *given, **named: (called.append(1), original(*given, **named))[1])
    monkeypatch.setattr(owner, method, around)
    with torch.no_grad():
        got = run(fused, inputs)
        calls = len(called)
        assert_close(got, run(model, inputs), tolerance(device))
    assert len(called) == 2 * calls > 0
    assert ops == []


# Properties of a model besides its values.


def test_state_and_copies(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, "Llama", device, nested=True)
    with torch.no_grad():
        expected = run(model, inputs)
        states = [each.state_dict() for each in (model, fused)]
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(*values) for values in zip(states[0].values(), states[1].values(), strict=True))
        copied = copy.deepcopy(fused)
        assert_close(run(copied, inputs), expected, tolerance(device))
        assert ops == ["forward"] * MLPS
        alike(lambda each: other_weight(each.model.layers[0].mlp.gate_proj), copied)
        assert_close(run(fused, inputs), expected, tolerance(device))  # nothing is shared


@pytest.mark.parametrize("kind", [Gated, Plain])
def test_quantised_after(fused_mlp, device, ops, kind):
    """A fused module stays right after its projections are replaced by quantised ones."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module = kind(bias=True, sizes=(64, 128, 64)).to(device, dtype).train()
    plain = copy.deepcopy(module)
    fused_mlp.fuse_mlps(module)
    for each in (module, plain):
        quantise(each, dtype)
    x = torch.randn(5, 64, device=device, dtype=dtype)
    with torch.no_grad():
        assert_close(module(x), plain(x), tolerance(device))
    assert ops == ["forward"]


def test_verification_leaves_weights_alone(fused_mlp, device):
    """Verification keeps weights unchanged, though on a CPU a four-bit layer repacks its weight when called in eval."""
    model, _ = build("Llama", device)
    model.eval()
    weights = [(layer.weight.data.clone(), layer.weight.quant_state) for layer in layers_in(model)]
    assert not fused_mlp.fuse_mlps(model).left
    for layer, (data, state) in zip(layers_in(model), weights, strict=True):
        assert torch.equal(layer.weight.data, data)
        assert layer.weight.quant_state is state


def test_compiled(fused_mlp, device):
    """Under torch.compile, the code of bitsandbytes is traced."""
    torch.compiler.reset()
    model, fused, inputs = pair(fused_mlp, "Llama", device)
    compiled = torch.compile(fused, backend="aot_eager")
    with torch.no_grad():
        assert_close(run(compiled, inputs), run(model, inputs), tolerance(device))


@pytest.mark.skipif(machine.device_type() != "cpu", reason="on a GPU they are fused")
@pytest.mark.parametrize("adapted", [False, True][machine.has_tiles() :])
def test_left_on_a_cpu(fused_mlp, device, ops, adapted, monkeypatch):
    """On a CPU such layers are not even inspected at a call, and the report says why they are left."""
    with fused_mlp.backend("auto"):
        model, inputs = build("Llama", device, adapted=adapted)
        fused = copy.deepcopy(model)
        report = fused_mlp.fuse_mlps(fused)
        assert len(report.left) == MLPS
        reasons = {module.reason.partition("(a ")[2].removesuffix(")") for module in report.left}
        assert all(reason.endswith("on a CPU, where its own kernel runs") for reason in reasons)
        parts = importlib.import_module(f"{fused_mlp.__name__}.models.parts.adapters")
        if not adapted:
            monkeypatch.setattr(parts, "layer_of", None)
        assert_same(model, fused, inputs)
    assert ops == []


@pytest.mark.skipif(not machine.has_tiles(), reason="on a GPU they are fused, and on other CPUs left")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@nestings
@pytest.mark.parametrize("kind", ["Llama", "Phi3", "GPT-NeoX"])
def test_by_themselves_on_a_cpu(fused_mlp, device, ops, kind, nested, dtype):
    """In inference weights are read packed and stay unchanged; under autograd the layers are called."""
    with fused_mlp.backend("auto"):
        model, inputs = build(kind, device, dtype, nested)
        plain, fused = decoded(fused_mlp, model).eval(), copy.deepcopy(model).eval()
        report = fused_mlp.fuse_mlps(fused)
        assert len(report.fused) >= MLPS and not report.left
        with torch.no_grad():
            expected, found = (run(each, inputs) for each in (plain, fused))
        assert ops == ["packed"] * MLPS
        assert_close(found, expected, 1e-4 if dtype == torch.float32 else 6e-2)
        assert not any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers_in(fused))
        ops.clear()
        embedded = fused.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        fused(inputs_embeds=embedded)[0].float().square().mean().backward()
        assert embedded.grad is not None and ops == []


@pytest.mark.skipif(not machine.has_tiles(), reason="on a GPU they are fused, and on other CPUs left")
def test_many_rows_of_float32_on_a_cpu(fused_mlp, device, ops):
    """Many rows of float32 are left to the layers: no kernel reads codes for them, and the layers take less time."""
    with fused_mlp.backend("auto"), torch.no_grad():
        model, _ = build("Llama", device)
        fused = copy.deepcopy(model).eval()
        assert fused_mlp.fuse_mlps(fused).fused
        for rows, taken in ((96, MLPS), (97, 0)):
            inputs = {"input_ids": torch.randint(3, 60, (1, rows), device=device)}
            assert_close(run(fused, inputs), run(model.eval(), inputs), 5e-2)
            assert ops == ["packed"] * taken
            ops.clear()


@pytest.mark.skipif(not machine.has_tiles(), reason="elsewhere they are decoded, or left")
def test_layouts_that_are_left_on_a_cpu(fused_mlp, device):
    layer = nn.Linear(72, 96, bias=False)
    part = layer_4bit(layer, torch.float32)
    parts = importlib.import_module(f"{fused_mlp.__name__}.models.parts.quantized")
    with fused_mlp.backend("auto"):
        assert "with 72 inputs in blocks of 64, which no kernel supports" in parts.layer_of(part)
