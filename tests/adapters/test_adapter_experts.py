"""LoRA on the experts of mixtures: adapters of experts_mlp against changed weights, and PEFT's wrappers on models."""

import copy
import functools
import gc
import itertools
import sys

import peft
import pytest
import torch
from peft.tuners.lora import layer as lora
from torch.utils._python_dispatch import TorchDispatchMode

import fuzz_experts
import machine
import mixtures
import reference
from expert_calls import drawn, forms, hopper, loop, trained_by_kernels
from reference import FORMULAS
from safety import alike, assert_close, count_calls

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
MODELS = ("qwen3_moe", "mixtral", "gpt_oss")


def factors(made, rank, *, transposed=False, dtype=None, scale=1.0):
    """Factors of both layers by name, in PEFT's layout: b is [out, rank, experts]."""
    found = {}
    for name in ("gate_up", "down"):
        weight = made[f"{name}_weight"]
        experts, out, width = (weight.mT if transposed else weight).shape
        made_as = {"device": weight.device, "dtype": dtype or weight.dtype}
        found[f"{name}_a"] = torch.randn(experts, rank, width, **made_as) * scale * max(width, 1) ** -0.5
        found[f"{name}_b"] = torch.randn(out, rank, experts, **made_as) * scale * rank**-0.5
    return found


def ours(fused_mlp, given, which=("gate_up", "down"), scalings=(0.5, 2.0), **form):
    given, parts = dict(given), {}
    for name, scaling in zip(("gate_up", "down"), scalings, strict=True):
        a, b = given.pop(f"{name}_a"), given.pop(f"{name}_b")
        if name in which:
            parts[f"{name}_adapter"] = fused_mlp.Adapter(a, b.permute(2, 0, 1), scaling)
    return fused_mlp.experts_mlp(**given, **parts, **form)


def changed(given, which=("gate_up", "down"), scalings=(0.5, 2.0), transposed=False, **form):
    """The reference formula, with the adapters added to the weights."""
    given = dict(given)
    for name, scaling in zip(("gate_up", "down"), scalings, strict=True):
        a, b = given.pop(f"{name}_a"), given.pop(f"{name}_b")
        change = scaling * b.permute(2, 0, 1) @ a
        if name in which:
            given[f"{name}_weight"] = given[f"{name}_weight"] + (change.mT if transposed else change)
    act = FORMULAS["silu"].exact
    return loop(act, **given, transposed=transposed, **form)


def gradients(compute, given, names, grad):
    leaves = {name: value.detach().requires_grad_(name in names) for name, value in given.items()}
    leaves["top_k_index"] = given["top_k_index"]
    result = compute(leaves)
    if not names:
        return [result]
    return [result.detach(), *torch.autograd.grad(result, [leaves[name] for name in names], grad.to(result.dtype))]


def check(fused_mlp, made, dtype, names=(), **options):
    """Checks values and gradients against float64, with the error of PyTorch's operations as the limit."""
    out = made["down_weight"].shape[2 if options.get("transposed", False) else 1]
    grad = torch.randn(made["x"].shape[0], out, device=made["x"].device).to(dtype)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in made.items()}
    with reference.poisoned_memory(made["x"].device):
        got = gradients(functools.partial(ours, fused_mlp, **options), made, names, grad)
    with fused_mlp.backend("torch"):
        composed = gradients(functools.partial(ours, fused_mlp, **options), made, names, grad)
    exact = gradients(functools.partial(changed, **options), wide, names, grad)
    for name, mine, other, exactly in zip(("", *names), got, composed, exact, strict=True):
        assert mine.dtype == other.dtype
        size = exactly.norm() + 1e-12
        errors = [((each.double() - exactly).norm() / size).item() for each in (mine, other)]
        # With few tokens, cancellation may make a gradient small in any implementation.
        assert errors[0] <= 2 * errors[1] + (1e-5 if dtype == torch.float32 else 1e-2), f"{name}: {errors}"
        assert errors[0] <= (1e-4 if dtype == torch.float32 else 2e-2) or made["x"].shape[0] < 30, f"{name}: {errors}"


TRAINED = ("x", "top_k_weights", "gate_up_a", "gate_up_b", "down_a", "down_b")
FORMS = [form for form in forms() if form["gated"] or not form["interleaved"]]


@pytest.mark.parametrize("tokens", [1, 7, 40], ids=lambda tokens: f"{tokens} tokens")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_and_gradients(fused_mlp, device, form, tokens):
    made = drawn(tokens, 3, 8, (40, 24, 33), device=device, biases=True, **form)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made["top_k_index"][0, 0] = 0
    made |= factors(made, 3, transposed=form["transposed"])
    check(fused_mlp, made, torch.float32, (*TRAINED, "gate_up_weight", "down_weight", "down_bias"), **form)


@pytest.mark.parametrize("which", [("gate_up",), ("down",)], ids=str)
def test_one_adapter_alone(fused_mlp, device, which):
    made = drawn(9, 3, 4, device=device)
    made["top_k_weights"], made["top_k_index"][0, 0] = made["top_k_weights"].nan_to_num(0.3), 0
    made |= factors(made, 4)
    check(fused_mlp, made, torch.float32, ("x", f"{which[0]}_a", f"{which[0]}_b"), which=which)


# Tokens, k, experts, sizes and ranks: taken by Hopper's kernels, and composed elsewhere.
SHAPES = [
    (1, 2, 16, (128, 128), 8),
    (5, 2, 12, (192, 192), 64),
    (37, 3, 5, (256, 128), 5),
    (200, 2, 4, (192, 256), 72),
    (400, 4, 8, (128, 192), 16),
    (60, 1, 3, (192, 64), 4),
]


@hopper
@pytest.mark.parametrize("which", [("gate_up", "down"), ("gate_up",), ("down",)], ids=str)
@pytest.mark.parametrize("biases", [False, True], ids=["without biases", "with biases"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_that_train_by_kernels(fused_mlp, device, form, biases, which):
    """All forms train by kernels; limits are out of reach, as rounding may move a sum across one."""
    form = {**form, "limit": 1e3} if "limit" in form else form
    for tokens, k, experts, sizes, rank in SHAPES[1:5]:
        made = drawn(tokens, k, experts, (*sizes, sizes[0]), dtype=torch.bfloat16, device=device, biases=biases, **form)
        made["top_k_weights"], made["top_k_index"][0, 0] = made["top_k_weights"].nan_to_num(0.3), 0
        made |= factors(made, rank, transposed=form["transposed"])
        names = [name for name in TRAINED if not name.startswith(("gate_up", "down")) or name[:-2] in which]
        names += ["gate_up_bias", "down_weight"] if biases else []
        with trained_by_kernels(fused_mlp) as run:
            check(fused_mlp, made, torch.bfloat16, names, which=which, **form)
        assert run.call_count == 1


@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "float32 adapters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes", "rank"), SHAPES, ids=str)
def test_shapes(fused_mlp, device, tokens, k, experts, sizes, rank, dtype, wide):
    made = drawn(tokens, k, experts, (*sizes, sizes[0]), dtype=dtype, device=device)
    made["top_k_weights"], made["top_k_index"][0, 0] = made["top_k_weights"].nan_to_num(0.3), 0
    made |= factors(made, rank, dtype=torch.float32 if wide else None)
    check(fused_mlp, made, dtype, TRAINED)
    check(fused_mlp, made, dtype)
    if tokens < 200:
        check(fused_mlp, made, dtype, (*TRAINED, "gate_up_weight", "down_weight"))


@hopper
@pytest.mark.parametrize(("tokens", "k", "experts", "sizes", "rank"), SHAPES[:5], ids=str)
def test_kernels_take_them(fused_mlp, device, monkeypatch, tokens, k, experts, sizes, rank):
    native, called = sys.modules[f"{fused_mlp.__name__}.backends.native"], []
    for name in ("adapted_experts", *(f"experts_training_{each}" for each in ("forward", "backward", "backward_"))):
        op = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *given, name=name, op=op: (called.append(name), op(*given))[1])
    made = drawn(tokens, k, experts, (*sizes, sizes[0]), dtype=torch.bfloat16, device=device)
    made["top_k_weights"], made["top_k_index"][0, 0] = made["top_k_weights"].nan_to_num(0.3), 0
    made |= factors(made, rank)
    gradients(functools.partial(ours, fused_mlp), made, TRAINED, torch.ones_like(made["x"]))
    assert called == ["experts_training_forward", "experts_training_backward_"]
    with torch.no_grad():
        ours(fused_mlp, made)
    assert called[2:] == ["adapted_experts"]


@hopper
def test_a_graph_that_is_kept(fused_mlp, device):
    """Only the last backward overwrites the kept values."""
    made = drawn(60, 2, 4, (128, 192, 128), device=device, dtype=torch.bfloat16)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made |= factors(made, 8)
    leaves = {name: value.detach().requires_grad_(name in TRAINED) for name, value in made.items()}
    result = ours(fused_mlp, leaves)
    wanted = [leaves[name] for name in TRAINED]
    first, second, last = (
        torch.autograd.grad(result, wanted, torch.ones_like(result), retain_graph=keep) for keep in (True, True, False)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, last))


@hopper
def test_sorted_rows_are_not_kept(fused_mlp, device):
    """Sorted rows are not kept, as the gradient of the first factor gathers the tokens."""
    made = drawn(60, 2, 4, (128, 192, 128), device=device, dtype=torch.bfloat16)
    made |= factors(made, 8)
    result = ours(fused_mlp, {name: value.detach().requires_grad_(name in TRAINED) for name, value in made.items()})
    kept = [each for each in result.grad_fn.saved_tensors if each is not None and each.shape[1:] == (128,)]
    assert [len(each) for each in kept] == [60]


def test_gradients_of_gradients(fused_mlp, device):
    made = drawn(5, 2, 4, (64, 128, 64), device=device, dtype=torch.float64)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3).double()
    made |= factors(made, 2, scale=0.5)
    names = ("x", "gate_up_a", "gate_up_b", "down_a", "down_b")

    def compute(*leaves):
        return ours(fused_mlp, made | dict(zip(names, leaves, strict=True)))

    leaves = [made[name].requires_grad_() for name in names]
    assert torch.autograd.gradgradcheck(compute, leaves, fast_mode=True)


def test_no_tokens(fused_mlp, device):
    made = drawn(0, 3, 4, device=device)
    made |= factors(made, 4)
    given = {name: value.requires_grad_(value.is_floating_point()) for name, value in made.items()}
    result = ours(fused_mlp, given)
    result.sum().backward()
    assert result.shape == (0, 33)
    assert not given["gate_up_a"].grad.any()


@pytest.mark.filterwarnings("ignore:.*not writable")
def test_compiled(fused_mlp, device):
    torch.compiler.reset()
    made = drawn(9, 3, 4, device=device)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made |= factors(made, 4)
    compute = functools.partial(ours, fused_mlp)
    compiled = torch.compile(compute, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(made), compute(made), 1e-5)


WRONG = {
    "a of too few experts": ("gate_up_adapter.a must be [4, rank, 40]", lambda a, b: (a[:-1], b)),
    "a too narrow": ("gate_up_adapter.a must be [4, rank, 40]", lambda a, b: (a[..., :-1], b)),
    "a of a layer": ("gate_up_adapter.a must be [4, rank, 40]", lambda a, b: (a[0], b)),
    "b as PEFT has it": ("gate_up_adapter.b must be [4, 48, 3]", lambda a, b: (a, b.permute(1, 2, 0))),
    "b of another rank": ("gate_up_adapter.b must be [4, 48, 3]", lambda a, b: (a, b[..., :-1])),
    "another dtype": ("gate_up_adapter.a", lambda a, b: (a.double(), b.double())),
    "no scaling": ("gate_up_adapter.scaling must be a number, got NoneType", lambda a, b: (a, b, None)),
    "dropout": ("gate_up_adapter must have neither bias nor dropout", lambda a, b: (a, b, 1.0, None, "0")),
}


def test_no_hidden_features(fused_mlp, device):
    made = drawn(5, sizes=(16, 0, 8), dtype=torch.bfloat16, device=device)
    found = {name: factor.requires_grad_() for name, factor in factors(made, 5).items()}
    result = ours(fused_mlp, made | found)
    result.sum().backward()
    assert not result.any() and not any(factor.grad.any() for factor in found.values())


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(fused_mlp, device, wrong):
    words, change = WRONG[wrong]
    made = drawn(3, device=device)
    found = factors(made, 3)
    adapter = fused_mlp.Adapter(*change(found["gate_up_a"], found["gate_up_b"].permute(2, 0, 1)))
    with pytest.raises((ValueError, TypeError)) as error:
        fused_mlp.experts_mlp(**made, gate_up_adapter=adapter)
    assert words in str(error.value)


def test_bias_and_dropout_are_refused(fused_mlp, device):
    made = drawn(3, device=device)
    found = factors(made, 3)
    a, b = found["down_a"], found["down_b"].permute(2, 0, 1)
    for more, got in (({"bias": b[0, :, 0]}, "a bias"), ({"dropout": 0.1}, "dropout = 0.1")):
        with pytest.raises(ValueError, match=f"down_adapter must have neither bias nor dropout for experts, got {got}"):
            fused_mlp.experts_mlp(**made, down_adapter=fused_mlp.Adapter(a, b, **more))


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor made by an operation."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.size = max(self.size, each.numel())
        return result


@pytest.mark.parametrize("tokens", [2, 20])
def test_nothing_of_a_weights_size(fused_mlp, device, tokens):
    made = drawn(tokens, 2, 16, (64, 64, 64), device=device)
    made["top_k_weights"] = made["top_k_weights"].nan_to_num(0.3)
    made |= factors(made, 2)
    with Largest() as largest:
        gradients(functools.partial(ours, fused_mlp), made, TRAINED, torch.ones_like(made["x"]))
    assert 0 < largest.size < made["down_weight"].numel() // 2


# PEFT's models.


@pytest.fixture
def calls(fused_mlp, monkeypatch):
    """Records the calls of experts with adapters."""
    module, called = sys.modules[f"{fused_mlp.__name__}.calls"], []
    compute = module.adapted_experts
    monkeypatch.setattr(
        module, "adapted_experts", lambda *given, **named: (called.append(1), compute(*given, **named))[1]
    )
    return called


def adapted(model, **options):
    options = {"r": 4, "lora_alpha": 6, "target_parameters": TARGETS, "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def pair(fused_mlp, device, kind="qwen3_moe", dtype=torch.float32, **options):
    torch.manual_seed(1)
    model = adapted(mixtures.build(kind, dtype), **options).to(device)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    return model, fused, torch.randint(3, 96, (2, 9), device=device)


def run(model, ids):
    model.zero_grad()
    logits = model(ids).logits
    if logits.requires_grad:
        logits.float().square().mean().backward()
    return logits.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same(model, fused, ids, tolerance=1e-4):
    assert_close(run(fused, ids), run(model, ids), tolerance)
    with torch.no_grad():
        assert_close(fused(ids).logits, model(ids).logits, tolerance)


def takes(dtype=torch.float32):
    """True if adapted experts are fused here: GPU kernels do not take float32."""
    return machine.device_type() == "cpu" or dtype != torch.float32


LAYERS = 2
trainings = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


@trainings
@pytest.mark.parametrize("everything", [False, True], ids=["adapters", "all"])
@pytest.mark.parametrize("kind", MODELS)
def test_models(fused_mlp, device, calls, kind, everything, training):
    model, fused, ids = pair(fused_mlp, device, kind)
    for each in (model, fused):
        each.train(training)
        for parameter in each.parameters():
            parameter.requires_grad_(parameter.requires_grad or everything)
    assert_same(model, fused, ids)
    assert len(calls) == (2 * LAYERS if takes() else 0)


@pytest.mark.parametrize("kind", MODELS)
def test_bfloat16(fused_mlp, device, calls, kind):
    """PEFT's float32 adapters on 16-bit experts are right; routers, whose choice rounding may change, are left out."""
    model, fused, _ = pair(fused_mlp, device, kind, torch.bfloat16)
    x, weights = torch.randn(18, 32, device=device).bfloat16(), torch.rand(18, 2, device=device).bfloat16()
    index = torch.rand(18, 6, device=device).topk(2).indices

    def run_experts(model, dtype):
        experts = next(each for name, each in model.named_modules() if name.endswith("experts"))
        result = experts(x.to(dtype), index, weights.to(dtype))
        result.float().square().mean().backward()
        given = {name: each.grad for name, each in experts.named_parameters() if each.grad is not None}
        return result.detach(), given

    exactly, of_exact = run_experts(copy.deepcopy(model).float(), torch.float32)
    (own, of_own), (got, of_ours) = (run_experts(each, torch.bfloat16) for each in (model, fused))
    assert of_own and of_own.keys() == of_ours.keys()
    for name in of_own:
        assert of_ours[name].dtype == of_own[name].dtype
    rows = [(exactly, own, got), *((of_exact[name], of_own[name], of_ours[name]) for name in of_own)]
    for exact, theirs, mine in rows:
        errors = [((each.float() - exact).norm() / exact.norm()).item() for each in (mine, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-2
    assert len(calls) == 1


CONFIGS = {
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "up alone": {"target_parameters": TARGETS[:1]},
    "down alone": {"target_parameters": TARGETS[1:]},
    "with linear layers": {"target_modules": ["q_proj", "v_proj"]},
    "a rank each": {"rank_pattern": {"experts.gate_up_proj": 7}, "alpha_pattern": {"experts.down_proj": 3}},
    "one layer": {"layers_to_transform": [1]},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_configurations(fused_mlp, device, calls, config):
    model, fused, ids = pair(fused_mlp, device, **CONFIGS[config])
    assert_same(model, fused, ids)
    assert (len(calls) > 0) == takes()


def test_random_configurations(fused_mlp, device, calls):
    for seed, kind in zip(range(6), itertools.cycle(MODELS), strict=False):
        torch.manual_seed(seed)
        rank, alpha = torch.randint(1, 9, (2,)).tolist()
        targets = TARGETS if seed % 3 else TARGETS[seed // 3 : seed // 3 + 1]
        options = {"r": rank, "lora_alpha": alpha, "target_parameters": targets, "use_rslora": bool(seed % 2)}
        assert_same(*pair(fused_mlp, device, kind, **options))
    assert (len(calls) > 0) == takes()


def test_explained(fused_mlp, device):
    model, fused, _ = pair(fused_mlp, device, dtype=torch.bfloat16)
    experts = [part for part in fused_mlp.explain(model).parts if part.pattern.startswith("experts")]
    assert [part.extent for part in experts] == ["none"] * LAYERS
    report = fused_mlp.fuse_mlps(model)
    assert sum(entry.pattern == "experts with LoRA of rank 4" for entry in report.fused) == LAYERS
    assert not any(entry.pattern.startswith("experts") and "rank" not in entry.pattern for entry in report.modules)
    assert "experts with LoRA of rank 4" in {part.pattern for part in fused_mlp.explain(fused).parts}
    alike(lambda model: model.base_model.disable_adapter_layers(), fused)
    assert "experts" in {part.pattern for part in fused_mlp.explain(fused).parts}


def test_states(fused_mlp, device, calls):
    """Each change of adapters takes effect at the next call; if two are active at once, PEFT's code runs."""
    model, fused, ids = pair(fused_mlp, device)
    second = {"r": 2, "target_parameters": TARGETS, "init_lora_weights": False}
    for step, runs in (
        (lambda model: model.add_adapter("second", peft.LoraConfig(**second)), True),
        (lambda model: model.set_adapter("second"), True),
        (lambda model: model.base_model.set_adapter(["default", "second"]), False),
        (lambda model: model.set_adapter("default"), True),
        (lambda model: model.merge_adapter(), False),
        (lambda model: model.unmerge_adapter(), True),
        (lambda model: model.base_model.disable_adapter_layers(), False),
        (lambda model: model.base_model.enable_adapter_layers(), True),
        (lambda model: model.set_adapter("second"), True),
        (lambda model: model.delete_adapter("second"), None),
        (lambda model: model.set_adapter("default"), True),
    ):
        alike(step, model, fused)
        calls.clear()
        assert_same(model, fused, ids)
        if runs is not None:
            assert len(calls) == (2 * LAYERS if runs and takes() else 0)


def test_arguments_by_name(fused_mlp, device, calls):
    """A wrapper's arguments have the names that PEFT and the experts give them."""
    model, fused, _ = pair(fused_mlp, device)
    x, index = torch.randn(5, 32, device=device), torch.randint(4, (5, 2), device=device)
    routing = {"top_k_weights": torch.rand(5, 2, device=device), "top_k_index": index}
    wrappers = [
        next(part for part in each.modules() if type(part).__name__ == "ParamWrapper") for each in (fused, model)
    ]
    with torch.no_grad():
        for given in ((x,), ()):
            calls.clear()
            named = routing if given else {**routing, "x": x}
            assert_close(*(wrapper(*given, **named) for wrapper in wrappers))
            assert len(calls) == takes()


def test_disabled_while_merged(fused_mlp, device):
    """PEFT removes a merged, disabled adapter from the weights at the next call."""
    model, fused, ids = pair(fused_mlp, device)
    alike(lambda model: model.merge_adapter(), model, fused)
    with model.disable_adapter(), fused.disable_adapter():
        assert_same(model, fused, ids)
    assert_same(model, fused, ids)


def test_adapters_on_a_fused_model(fused_mlp, device, calls):
    """Adapters on a fused model run PEFT's code until the model is fused again."""
    model = mixtures.build("qwen3_moe").to(device)
    fused, ids = copy.deepcopy(model), torch.randint(3, 96, (2, 9), device=device)
    fused_mlp.fuse_mlps(fused)
    model, fused = alike(adapted, model, fused)
    assert_same(model, fused, ids)
    assert not calls
    fused_mlp.fuse_mlps(fused)
    assert_same(model, fused, ids)
    assert len(calls) == (2 * LAYERS if takes() else 0)


def test_saved_and_unloaded(fused_mlp, device, calls, tmp_path):
    model, fused, ids = pair(fused_mlp, device)
    fused.save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(mixtures.build("qwen3_moe").to(device), tmp_path)
    fused_mlp.fuse_mlps(fresh)
    with torch.no_grad():
        assert_close(fresh(ids).logits, model(ids).logits)
        assert_close(fused.merge_and_unload()(ids).logits, model.merge_and_unload()(ids).logits)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(fused_mlp, device, calls, use_reentrant):
    model, fused, ids = pair(fused_mlp, device)
    for each in (model, fused):
        each.train()
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_close(run(fused, ids), run(model, ids))
    assert len(calls) == (2 * LAYERS if takes() else 0)


def test_hooks_are_called(fused_mlp, device, calls):
    """Hooks on the experts within the wrappers are called, as PEFT's code runs."""
    model, fused, ids = pair(fused_mlp, device)
    seen = []
    for each in (model, fused):
        for path, module in each.named_modules():
            if path.endswith("experts"):
                module.get_base_layer().register_forward_hook(lambda *given: seen.append(1))
    assert_same(model, fused, ids)
    assert len(seen) == 2 * 2 * LAYERS
    assert not calls


def test_cast_after_fusing(fused_mlp, device, calls):
    model, fused, ids = pair(fused_mlp, device)
    alike(lambda model: model.double().base_model.model.set_experts_implementation("eager"), model, fused)
    assert_same(model, fused, ids)
    assert not calls


def test_compiled_models(fused_mlp, device, calls):
    """torch.compile traces PEFT's own code."""
    torch.compiler.reset()
    model, fused, ids = pair(fused_mlp, device)
    with torch.no_grad():
        assert_close(torch.compile(fused, backend="eager")(ids).logits, model(ids).logits)
    assert not calls


def test_an_error_is_that_of_the_original(fused_mlp, device):
    model, fused, _ = pair(fused_mlp, device)
    experts = [
        next(each for path, each in model.named_modules() if path.endswith("experts")) for model in (model, fused)
    ]
    x = torch.randn(3, 32, device=device)
    errors = []
    for each in experts:
        with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as error:
            each(x, adapter_names=["default"])
        errors.append(str(error.value))
    assert errors[0] == errors[1]


@pytest.mark.skipif(machine.device_type() != "cuda", reason="the allocator of a GPU counts")
def test_memory(fused_mlp, device):
    """A training step needs a fraction of the memory of PEFT's, which is bound by the size of the weights."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, **dict.fromkeys(mixtures.EXPERTS, 64)}
    model = adapted(mixtures.build("qwen3_moe", torch.bfloat16, **sizes)).to(device)
    fused, ids, peaks = copy.deepcopy(model), torch.randint(3, 96, (2, 9), device=device), []
    fused_mlp.fuse_mlps(fused)
    for each in (fused, model):
        run(each, ids)
        each.zero_grad()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(each, ids)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < peaks[1]


def test_experts_at_random(fused_mlp, tmp_path):
    outcomes = [fuzz_experts.adapted_outcome(fused_mlp, seed, tmp_path) for seed in range(100)]
    assert outcomes.count("fused") >= 10


# The source of PEFT's class.


@pytest.fixture
def wrappers(fused_mlp):
    """The reader of the class, with its cache cleared before and after."""
    read = sys.modules[f"{fused_mlp.__name__}.models.experts.wrappers"]
    read.known.cache_clear()
    yield read
    read.known.cache_clear()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["forward", "get_delta_factors", "active_adapters"])
def test_patched_methods_are_left(fused_mlp, device, calls, wrappers, monkeypatch, method, when):
    called = []

    def patch():
        count_calls(monkeypatch, lora.ParamWrapper, method, called)

    torch.manual_seed(1)
    model = adapted(mixtures.build("qwen3_moe")).to(device)
    fused, ids = copy.deepcopy(model), torch.randint(3, 96, (2, 9), device=device)
    if when == "before":
        patch()
    fused_mlp.fuse_mlps(fused)
    if when == "after":
        patch()
    with torch.no_grad():
        got = fused(ids).logits
        assert called
        assert_close(got, model(ids).logits)
    assert not calls


def test_a_class_of_another_version_is_left(wrappers, monkeypatch):
    """A class without a method that this version calls is left, too."""
    monkeypatch.delattr(lora.ParamWrapper, "_activate_lora")
    assert wrappers.known(lora.ParamWrapper) is None


class Doubled(lora.ParamWrapper):
    def forward(self, x, *args, **kwargs):
        return 2 * super().forward(x, *args, **kwargs)


def test_other_classes_are_left(fused_mlp, device, calls, wrappers):
    torch.manual_seed(1)
    model = adapted(mixtures.build("qwen3_moe")).to(device)
    for module in model.modules():
        if type(module) is lora.ParamWrapper:
            module.__class__ = Doubled
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert_same(model, fused, torch.randint(3, 96, (2, 9), device=device))
    assert not calls
