"""PEFT's LoRA on fused models, against models that are not fused: values, gradients, states, modes, layers alone."""

import copy
import functools
import pickle
import sys

import peft
import pytest
import torch
from peft.tuners.lora import layer as lora
from torch import nn

from modules import Plain
from safety import alike, assert_close, count_calls
from safety import run_with_gradients as run
from tiny_models import build
from trainers import losses_of

# The projections of the MLPs; each model has two MLPs.
PROJECTIONS = {
    "Llama": ["gate_proj", "up_proj", "down_proj"],
    "Phi3": ["gate_up_proj", "down_proj"],
    "GPT-NeoX": ["dense_h_to_4h", "dense_4h_to_h"],
    "GPT-2": ["mlp.c_fc", "mlp.c_proj"],
    "BERT": r".*layer\.\d+\.(intermediate|output)\.dense",
    "ViT": ["fc1", "fc2"],
}
MLPS = 2
CONFIGS = {
    "patterns": {"rank_pattern": {"up_proj": 8, "layers.1.mlp.down_proj": 3}, "alpha_pattern": {"gate_proj": 32}},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "biases": {"lora_bias": True},
    "gate": {"target_modules": ["gate_proj"]},
    "up and down": {"target_modules": ["up_proj", "down_proj"]},
    "everything": {"target_modules": "all-linear"},
    "one layer": {"layers_to_transform": [1]},
    "a large rank": {"r": 64},
}
trainings = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
kinds = pytest.mark.parametrize("kind", PROJECTIONS)


@pytest.fixture
def ops(fused_mlp, monkeypatch):
    """Records the calls of the ops with adapters, "forward" or "backward", in order."""
    adapters, called = sys.modules[f"{fused_mlp.__name__}.adapters"], []
    for name in ("forward", "backward"):
        op = getattr(adapters, f"_plain_{name}")
        spy = lambda *given, name=name, op=op: (called.append(name), op(*given))[1]  # noqa: E731
        monkeypatch.setattr(adapters, f"_plain_{name}", spy)
    return called


def adapted(model, kind="Llama", **options):
    """A model with adapters that do not start as the identity."""
    options = {"r": 4, "target_modules": PROJECTIONS[kind], "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def pair(fused_mlp, device, kind="Llama", dtype=torch.float32, **options):
    """An adapted model, its fused copy (unverified, as verification calls ops too), and inputs for both."""
    model, inputs = build(kind, device, dtype)
    torch.manual_seed(1)
    model = adapted(model, kind, **options)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused, verify=False)
    return model, fused, inputs


def assert_same(model, fused, inputs, tolerance=1e-4, **options):
    """Both have the same values with and without autograd, the same gradients, and draw the same random numbers."""
    results, states = [], []
    for each in (fused, model):
        results.append(run(each, inputs, **options))
        states.append(torch.get_rng_state())
    assert_close(*results, tolerance)
    assert torch.equal(*states)
    with torch.no_grad():
        assert_close(run(fused, inputs, **options), run(model, inputs, **options), tolerance)


def assert_as_near(model, fused, inputs, **options):
    """The fused model is as close to the model in float32 as the unfused one is."""
    exact = run(
        copy.deepcopy(model).float(), {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    )
    wanted, own, found = ([result, *gradients.values()] for result, gradients in (
        exact, run(model, inputs, **options), run(fused, inputs, **options)
    ))  # fmt: skip
    for ours, theirs, exactly in zip(found, own, wanted, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        size = exactly.double().norm()
        errors = [(each.double() - exactly.double()).norm() / size for each in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 2e-2


def layers_in(model):
    return [module for module in model.modules() if isinstance(module, lora.Linear)]


def state_of(model):
    """The names of each module's attributes, including those that override methods."""
    return {path: set(vars(module)) for path, module in model.named_modules()}


# Values and gradients.


@trainings
@pytest.mark.parametrize("everything", [False, True], ids=["adapters", "all"])
@kinds
def test_values_and_gradients(fused_mlp, device, ops, kind, everything, training):
    model, fused, inputs = pair(fused_mlp, device, kind)
    for each in (model, fused):
        each.train(training)
        for parameter in each.parameters():
            parameter.requires_grad_(parameter.requires_grad or everything)
    if not training:  # the model's dropout may stand in the way after its attention
        assert fused_mlp.explain(fused).implementation == "fused"
    assert_same(model, fused, inputs)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS + ["forward"] * MLPS


@trainings
@pytest.mark.parametrize("config", CONFIGS)
def test_configurations(fused_mlp, device, ops, config, training):
    model, fused, inputs = pair(fused_mlp, device, **CONFIGS[config])
    alike(lambda model: model.train(training), model, fused)
    assert_same(model, fused, inputs)
    mlps = 1 if config == "one layer" else MLPS
    assert ops.count("forward") >= 2 * mlps
    assert ops.count("backward") >= mlps


@kinds
def test_adapters_on_a_fused_model(fused_mlp, device, ops, kind):
    model, inputs = build(kind, device)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused, verify=False)
    model, fused = alike(lambda model: adapted(model, kind), model, fused)
    assert_same(model, fused, inputs)
    assert ops.count("forward") == 2 * MLPS


def test_recomputed(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, device)
    fused_mlp.fuse_mlps(fused, memory="recompute", verify=False)
    assert_same(model.train(), fused.train(), inputs)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS + ["forward"] * MLPS


@pytest.mark.parametrize("kind", ["Llama", "Phi3", "GPT-2"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("wide", [False, True], ids=["bf16 adapters", "float32 adapters"])
def test_bfloat16(fused_mlp, device, ops, wide, autocast, kind):
    """Adapters are right in float32, PEFT's default, and in bfloat16."""
    model, inputs = build(kind, device, torch.bfloat16)
    model = adapted(model, kind)
    if not wide:
        model.to(torch.bfloat16)
    assert {layer.lora_A["default"].weight.dtype for layer in layers_in(model)} == {
        torch.float32 if wide else torch.bfloat16
    }
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused, verify=False)
    assert_as_near(model.train(), fused.train(), inputs, autocast=autocast)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS


def test_autocast_of_float32(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, device)
    assert_as_near(model, fused, inputs, autocast=torch.bfloat16)
    assert ops == ["forward"] * MLPS + ["backward"] * MLPS


@pytest.mark.parametrize("trained", [False, True])
def test_the_dtype_of_autocast(fused_mlp, device, forms, ops, trained):
    """The result has the dtype that autocast casts to, with autograd and without."""
    module = small().to(device).requires_grad_(trained)
    plain, x = copy.deepcopy(module), torch.randn(3, 32, device=device)
    fused_mlp.fuse_mlps(module, verify=False)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast(device.type, dtype=torch.bfloat16):
            assert_close(module(x).detach(), plain(x).detach(), 2e-2)
    assert ops == ["forward"] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_cast_after_fusing(fused_mlp, device, ops, dtype):
    model, fused, inputs = pair(fused_mlp, device)
    alike(lambda model: model.to(dtype), model, fused)
    if dtype == torch.float64:
        assert_same(model, fused, inputs)
        assert ops == []
    else:
        assert_as_near(model, fused, inputs)
        assert ops == ["forward"] * MLPS + ["backward"] * MLPS


def test_adapters_of_other_dtypes(fused_mlp, device, ops):
    """Adapters in float64 are left to PEFT, which raises its own error for what it rejects."""
    model, fused, inputs = pair(fused_mlp, device)

    def double(model, *names):
        for layer in layers_in(model):
            for name in names:
                getattr(layer, name).double()

    alike(lambda model: double(model, "lora_A", "lora_B"), model, fused)
    assert "of another dtype" in fused_mlp.explain(fused).reason
    assert_same(model, fused, inputs)
    assert ops == []
    alike(lambda model: model.float(), model, fused)
    alike(lambda model: double(model, "lora_A"), model, fused)
    for each in (model, fused):
        with pytest.raises(RuntimeError, match="dtype"):
            each(**inputs)
    assert ops == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(fused_mlp, device, ops, use_reentrant):
    model, fused, inputs = pair(fused_mlp, device)
    for each in (model, fused):
        each.train()
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same(model, fused, inputs)
    assert ops.count("backward") == MLPS
    assert ops.count("forward") == 3 * MLPS  # the checkpointed run, its recomputation, and the run without autograd


# States of adapters.


def test_states_of_several_adapters(fused_mlp, device, ops):
    """Each change of adapters takes effect at the next call; if two are active at once, the original runs."""
    model, fused, inputs = pair(fused_mlp, device)
    both, second = (model, fused), {"r": 2, "target_modules": PROJECTIONS["Llama"], "init_lora_weights": False}
    for step, runs in (
        (lambda model: model.add_adapter("second", peft.LoraConfig(**second)), True),
        (lambda model: model.set_adapter("second"), True),
        (lambda model: model.base_model.set_adapter(["default", "second"]), False),
        (lambda model: model.set_adapter("default"), True),
        (lambda model: model.merge_adapter(), False),
        (lambda model: model.unmerge_adapter(), True),
        (lambda model: model.merge_adapter(["second"]), False),
        (lambda model: model.unmerge_adapter(), True),
        (lambda model: model.base_model.disable_adapter_layers(), False),
        (lambda model: model.base_model.enable_adapter_layers(), True),
        (lambda model: model.set_adapter("second"), True),
        (lambda model: model.delete_adapter("second"), None),
        (lambda model: model.set_adapter("default"), True),
    ):
        alike(step, *both)
        ops.clear()
        assert_same(*both, inputs)
        if runs is not None:
            assert ops.count("forward") == (2 * MLPS if runs else 0)


def test_disabled_while_merged(fused_mlp, device):
    """PEFT removes a merged, disabled adapter from the weights at the next call."""
    model, fused, inputs = pair(fused_mlp, device)
    alike(lambda model: model.merge_adapter(), model, fused)
    with model.disable_adapter(), fused.disable_adapter():
        assert_same(model, fused, inputs)
        assert not any(layer.merged for layer in layers_in(fused))
    assert_same(model, fused, inputs)


def test_an_adapter_for_each_row(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, device)
    second = {"r": 2, "target_modules": PROJECTIONS["Llama"], "init_lora_weights": False}
    alike(lambda model: model.eval().add_adapter("second", peft.LoraConfig(**second)), model, fused)
    with torch.no_grad():
        given = {**inputs, "adapter_names": ["default", "second"]}
        assert_close(fused(**given)[0], model(**given)[0])
        assert ops == []
        assert_close(fused(**inputs)[0], model(**inputs)[0])
    assert ops == ["forward"] * MLPS


def test_dora_is_left(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, device, use_dora=True)
    assert "a peft.tuners.lora.layer.Linear of an unsupported variant" in fused_mlp.explain(fused).reason
    assert_same(model, fused, inputs)
    assert ops == []


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
@kinds
def test_dropout_of_kinds(fused_mlp, device, ops, kind, autocast):
    """Dropouts of float32 adapters are right; in autocast they draw in another dtype than the op computes in."""
    model, fused, inputs = pair(fused_mlp, device, kind, lora_dropout=0.3)
    for each in (model, fused):
        each.train()
        for module in each.modules():  # the model's own dropouts
            if isinstance(module, nn.Dropout) and module.p < 0.3:
                module.p = 0.0
    if autocast is None:
        assert_same(model, fused, inputs)
    else:
        assert_as_near(model, fused, inputs, autocast=autocast)
    is_one_op = device.type == "cuda" and kind != "Phi3"  # gate and up of a packed projection share a mask
    assert ("forward" in ops) == is_one_op


class UpFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        up = self.up(x)
        return self.down(nn.functional.silu(self.gate(x)) * up)


def test_the_order_of_dropouts(fused_mlp, device, ops):
    torch.manual_seed(0)
    options = {"target_modules": ["gate", "up", "down"], "lora_dropout": 0.5}
    model = adapted(nn.Sequential(UpFirst()).to(device), **options)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused, verify=False)
    assert_same(model, fused, {"input": torch.randn(70, 16, device=device)})
    assert ("forward" in ops) == (device.type == "cuda")


def test_dropout(fused_mlp, device, ops):
    """In training, the elements that the original drops are dropped, on a CPU by PyTorch; eval mode drops none."""
    model, fused, inputs = pair(fused_mlp, device, lora_dropout=0.3)
    alike(lambda model: model.train(), model, fused)
    assert_same(model, fused, inputs)
    assert (ops == []) == (device.type == "cpu")
    ops.clear()
    first, second = (run(fused, inputs)[0] for _ in range(2))
    assert torch.equal(first, second)
    ops.clear()
    alike(lambda model: model.eval(), model, fused)
    assert_same(model, fused, inputs)
    assert ops.count("forward") == 2 * MLPS


PARTS = {
    "layer": lambda layer: layer,
    "A": lambda layer: layer.lora_A["default"],
    "B": lambda layer: layer.lora_B["default"],
    "base layer": lambda layer: layer.base_layer,
    "dropout": lambda layer: layer.lora_dropout["default"],
}


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("part", PARTS)
def test_hooks_are_called(fused_mlp, device, ops, part, hook):
    model, fused, inputs = pair(fused_mlp, device)
    called = {id(each): 0 for each in (model, fused)}

    def see(*_, key):
        called[key] += 1

    for each in (model, fused):
        hooked = PARTS[part](layers_in(each)[-2])
        getattr(hooked, f"register_{hook}_hook")(functools.partial(see, key=id(each)))
    assert_same(model, fused, inputs)
    assert called[id(fused)] == called[id(model)] > 0
    # Without autograd, no backward hook is called.
    assert ops.count("forward") == 2 * (MLPS - 1) + (hook == "full_backward")


def test_other_weights_are_seen(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, device)

    def replaced(model):
        for layer in layers_in(model):
            a = layer.lora_A["default"]
            a.weight = nn.Parameter(torch.randn_like(a.weight))

    def altered(model):
        for layer in layers_in(model):
            layer.lora_B["default"].weight.data = torch.randn_like(layer.lora_B["default"].weight)
            layer.scaling["default"] = 0.7

    def another(model):
        for layer in layers_in(model):
            layer.base_layer = nn.Linear(layer.in_features, layer.out_features).to(device)

    for change in (replaced, altered, another):
        with torch.no_grad():
            before = fused(**inputs)[0]
            alike(change, model, fused)
            assert not torch.allclose(fused(**inputs)[0], before, atol=1e-3)
        ops.clear()
        assert_same(model, fused, inputs)
        assert ops.count("forward") == 2 * MLPS


# A model's life cycle.


@kinds
def test_restored(fused_mlp, device, ops, kind):
    model, inputs = build(kind, device)
    model = adapted(model, kind, target_modules="all-linear")
    before, values = state_of(model), copy.deepcopy(model.state_dict())
    report = fused_mlp.fuse_mlps(model)
    with torch.no_grad():
        fused = model(**inputs)[0]
    assert state_of(model) != before
    report.restore()
    assert state_of(model) == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert_close(model.state_dict(), values, 0.0)
    ops.clear()
    with torch.no_grad():
        assert_close(fused, model(**inputs)[0])
    assert ops == []


@trainings
@pytest.mark.parametrize("kind", ["Llama", "Phi3", "GPT-NeoX"])
def test_compiled(fused_mlp, device, ops, kind, training):
    torch.compiler.reset()
    model, fused, inputs = pair(fused_mlp, device, kind)
    alike(lambda model: model.train(training), model, fused)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    results = [run(each, inputs) for each in (model, compiled)]
    results[1] = results[1][0], {name.removeprefix("_orig_mod."): each for name, each in results[1][1].items()}
    assert_close(*results[::-1])
    assert ops == []
    assert_same(model, fused, inputs)
    assert ops.count("forward") == 2 * MLPS


def test_copies(fused_mlp, device, ops):
    """A copy stays fused; a saved and loaded model has its original methods and can be fused again."""
    model, fused, inputs = pair(fused_mlp, device, "ViT")
    copied, loaded = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    assert_same(model, loaded, inputs)
    assert ops == []
    fused_mlp.fuse_mlps(loaded, verify=False)
    for another in (copied, loaded):
        with torch.no_grad():
            layers_in(another)[0].lora_A["default"].weight.mul_(2)
            assert not torch.allclose(another(**inputs)[0], fused(**inputs)[0], atol=1e-4)
            layers_in(another)[0].lora_A["default"].weight.div_(2)
        ops.clear()
        assert_same(model, another, inputs)
        assert ops.count("forward") == 2 * MLPS


def test_unloaded(fused_mlp, device, ops):
    model, fused, inputs = pair(fused_mlp, device)
    model, fused = alike(lambda model: model.merge_and_unload(), model, fused)
    assert not layers_in(fused)
    assert_same(model, fused, inputs)
    assert ops == []


def test_trainer(fused_mlp, device, ops, tmp_path):
    """The losses of transformers.Trainer follow those of the unfused model."""
    model, fused, inputs = pair(fused_mlp, device, lora_dropout=0.0)
    options = {"max_steps": 4, "per_device_train_batch_size": 4}
    expected, found = (
        losses_of(each, inputs["input_ids"].repeat(4, 1), tmp_path, **options) for each in (model, fused)
    )
    assert len(expected) == 4
    assert expected[-1] < expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert ops.count("backward") == 4 * MLPS


# Standalone layers, fused on a CPU from 2^18 weights and 2^19 elements of x on.

WIDTH = 512


class Attention(nn.Module):
    """Two projections that are not an MLP."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x).softmax(-1) * WIDTH)


def layers_alone(fused_mlp, device, dtype=torch.float32, **options):
    """An attention with adapters, its fused copy, the report, and a large enough input."""
    torch.manual_seed(1)
    options = {"r": 8, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": False, **options}
    model = peft.get_peft_model(Attention().to(device, dtype), peft.LoraConfig(**options), autocast_adapter_dtype=False)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    x = torch.randn(2, WIDTH, WIDTH, device=device, dtype=dtype, requires_grad=True)
    return model, fused, report, x


def of_input(model, x):
    """The result, and the gradients of the input and of all parameters."""
    torch.manual_seed(2)
    wanted = [x, *(each for each in model.parameters() if each.requires_grad)]
    result = model(x)
    return result.detach(), torch.autograd.grad(result.square().mean(), wanted, allow_unused=True)


@trainings
def test_layers_alone(fused_mlp, device, ops, training):
    model, fused, report, x = layers_alone(fused_mlp, device)
    alike(lambda model: model.train(training), model, fused)
    assert [module.pattern for module in report.fused] == ["linear with LoRA of rank 8"] * 2
    assert fused_mlp.explain(fused).implementation == "fused"
    assert_close(of_input(fused, x), of_input(model, x))
    assert ops == ["forward"] * 2 + ["backward"] * 2
    with torch.no_grad():
        assert_close(fused(x), model(x))
    assert ops[4:] == ["forward"] * 2


def test_layers_alone_of_little(fused_mlp, device, ops):
    """Layers run as written on an input of few elements on a CPU, and as one op each on a GPU."""
    model, fused, _, x = layers_alone(fused_mlp, device)
    assert_close(fused(x[:, :5]), model(x[:, :5]))
    assert ops == ([] if device.type == "cpu" else ["forward"] * 2)


def test_layers_alone_of_no_tensor(fused_mlp, device):
    model, fused, _, _ = layers_alone(fused_mlp, device)
    for each in (model, fused):
        with pytest.raises(TypeError, match="tuple"):
            each((1.0,))


def test_states_of_layers_alone(fused_mlp, device, ops):
    model, fused, report, x = layers_alone(fused_mlp, device)
    for step, runs in (
        (lambda model: model.merge_adapter(), 0),
        (lambda model: model.unmerge_adapter(), 2),
        (lambda model: model.base_model.disable_adapter_layers(), 0),
        (lambda model: model.base_model.enable_adapter_layers(), 2),
        (lambda model: model.base_model.model.q_proj.register_forward_hook(lambda *_: None), 1),
        (lambda model: model.base_model.model.q_proj.base_layer.register_forward_hook(lambda *_: None), 1),
        (lambda model: model.base_model.model.o_proj.lora_A["default"].register_forward_hook(lambda *_: None), 0),
    ):
        alike(step, model, fused)
        ops.clear()
        assert_close(of_input(fused, x), of_input(model, x))
        assert ops.count("forward") == ops.count("backward") == runs
    report.restore()
    assert state_of(fused) == state_of(model)


def test_dropout_of_layers_alone(fused_mlp, device, ops):
    model, fused, _, x = layers_alone(fused_mlp, device, lora_dropout=0.4)
    alike(lambda model: model.train(), model, fused)
    is_left = device.type == "cpu"
    assert ("dropout before its adapter" in fused_mlp.explain(fused).reason) == is_left
    results = []
    for each in (fused, model):
        torch.manual_seed(2)
        results.append(of_input(each, x))
    assert_close(*results)
    assert (ops == []) == is_left
    ops.clear()
    alike(lambda model: model.eval(), model, fused)
    assert_close(of_input(fused, x), of_input(model, x))
    assert ops == ["forward"] * 2 + ["backward"] * 2


def test_compiled_layers_alone(fused_mlp, device, ops):
    torch.compiler.reset()
    model, fused, _, x = layers_alone(fused_mlp, device)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    assert_close(compiled(x).detach(), model(x).detach())
    assert ops == []


def test_explained_before_fusing(fused_mlp, device):
    model, _, _, _ = layers_alone(fused_mlp, device)
    assert fused_mlp.explain(model).implementation == "original"


# The source of PEFT's class.


@pytest.fixture
def forms(fused_mlp):
    """The reader of the class, with its cache cleared before and after."""
    read = sys.modules[f"{fused_mlp.__name__}.models.parts.adapters"]
    read.known.cache_clear()
    yield read
    read.known.cache_clear()


def small(kind=lora.Linear):
    """An MLP whose layers have adapters and are of the given class."""
    config = peft.LoraConfig(r=2, target_modules=["fc1", "fc2"], init_lora_weights=False)
    module = peft.inject_adapter_in_model(config, Plain())
    for layer in layers_in(module):
        layer.__class__ = kind
    return module


class Doubled(lora.Linear):
    def forward(self, x, *args, **kwargs):
        return 2 * super().forward(x, *args, **kwargs)


NAMED = {"forward": Doubled.forward, "__module__": lora.Linear.__module__, "__qualname__": "Linear"}
OTHERS = {
    "subclass": Doubled,
    "of the same name": type("Linear", (Doubled,), NAMED),
    "without methods": type("Linear", (lora.Linear,), {}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_classes_are_left(fused_mlp, device, forms, ops, kind):
    module = small(OTHERS[kind]).to(device)
    plain = copy.deepcopy(module)
    assert not any(map(forms.is_adapted, layers_in(module)))
    fused_mlp.fuse_mlps(module, verify=False)
    x = torch.randn(3, 32, device=device)
    assert_close(module(x), plain(x))
    assert ops == []


METHODS = ["forward", "active_adapters", "_cast_input_dtype"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", METHODS)
def test_patched_methods_are_left(fused_mlp, device, forms, ops, monkeypatch, method, when):
    """A method patched before the class is first read, or after fusing, is called, and no op runs."""
    called = []

    def patch():
        count_calls(monkeypatch, lora.Linear, method, called)

    module, x = small().to(device), torch.randn(3, 32, device=device)
    plain = copy.deepcopy(module)
    if when == "before":
        patch()
    fused_mlp.fuse_mlps(module, verify=False)
    if when == "after":
        module(x)
        assert ops == ["forward"]
        ops.clear()
        patch()
    got = module(x)
    calls = len(called)
    assert_close(got, plain(x))
    assert len(called) == 2 * calls > 0
    assert ops == []
