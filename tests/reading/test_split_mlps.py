"""MLPs whose halves are two modules: one op for both; one after the other as soon as anything watches their calls."""

import copy
import functools
import inspect
import sys
from types import MethodType

import pytest
import torch
import transformers
from torch import nn

from modules import Halves, Intermediate, Output
from safety import alike, assert_close, warmed, x_of
from survey import tiny
from test_coverage import built, inputs_of, largest_error
from tiny_models import LLM

# Model types, and the class whose code calls the halves.
TYPES = {
    "bert": "BertLayer",
    "roberta": "RobertaLayer",
    "xlm-roberta-xl": "XLMRobertaXLLayer",
    "mpnet": "MPNetLayer",
    "electra": "ElectraLayer",
    "deberta": "DebertaLayer",
    "deberta-v2": "DebertaV2Layer",
    "camembert": "CamembertLayer",
    "convbert": "ConvBertLayer",
    "megatron-bert": "MegatronBertLayer",
    "fnet": "FNetLayer",
    "layoutlm": "LayoutLMLayer",
    "nystromformer": "NystromformerLayer",
    "rembert": "RemBertLayer",
    "splinter": "SplinterLayer",
    "data2vec-vision": "Data2VecVisionLayer",
    "dpt": "DPTViTLayer",
}


@pytest.fixture
def whole(tell_ops, dispatched):
    """The shapes of what goes into whole MLPs that run as one op, with what is around them or without."""
    taken = []
    tell_ops(lambda name, given: taken.append(tuple(given[0].shape)) if name in ("mlp", "residual_mlp") else None)
    return taken


@pytest.mark.parametrize("model_type", TYPES)
def test_models(fused_mlp, device, whole, model_type):
    """One op a layer, and the same outputs; that training and `restore` are as before, test_coverage.py shows."""
    model = built(model_type).to(device)
    inputs = {name: value.to(device) for name, value in inputs_of(model).items()}
    with torch.no_grad():
        expected = model(**inputs)[0]
        fused = fused_mlp.fuse_mlps(model).fused
        joined = [entry for entry in fused if entry.pattern.startswith("plain in two modules")]
        ends = [entry for entry in fused if entry.pattern == "linear with residual and norm"]  # the ends of attention
        assert {(entry.class_name, entry.extent) for entry in joined} == {(TYPES[model_type], "full")}
        model(**inputs)  # the class of an activation is learnt at its first call
        whole.clear()
        assert largest_error([model(**inputs)[0]], [expected]) <= 5e-5
    assert len(whole) == len(joined) + len(ends)


def fused_pair(fused_mlp, device, module=None):
    return warmed(fused_mlp, (module or Halves()).to(device).eval(), x_of(device), pattern="plain in two modules")


def test_dropout_that_is_active_is_applied(fused_mlp, device, whole):
    """The dropout behind the last projection is the tail's own code."""
    module, fused = fused_pair(fused_mlp, device)
    module.output.dropout.train(), fused.output.dropout.train()
    whole.clear()
    x = x_of(device)
    with torch.no_grad():
        assert_close(*alike(lambda each: each(x), fused, module))
    assert len(whole) == 1


@pytest.mark.parametrize("model_type", ["deberta", "data2vec-vision"])  # with a sum and a norm behind, and without
def test_little_work_that_autograd_follows_is_left_at_once(fused_mlp, device, monkeypatch, model_type):
    """Both modules are called as they were written; all that is asked before is asked by compiled code."""
    model = built(model_type).to(device)
    inputs = {name: value.to(device) for name, value in inputs_of(model).items()}
    expected = model(**inputs)[0]
    fused_mlp.fuse_mlps(model)
    model(**inputs)  # the class of an activation is learnt at its first call
    dispatch = sys.modules[f"{fused_mlp.__name__}.dispatch"]
    if device.type == "cpu":
        monkeypatch.setitem(dispatch.LEAST_RECORDED[torch.float32], "mlp", dispatch.NEVER)
    for in_eval in (False, True):
        monkeypatch.setitem(dispatch.LEAST_WORK, (False, in_eval), dispatch.NEVER)
    running = sys.modules[f"{fused_mlp.__name__}.models.running.split_mlps"]
    monkeypatch.setattr(running, "split_mlp", lambda *_, **__: pytest.fail("asked in Python"))
    assert largest_error([model(**inputs)[0]], [expected]) <= 5e-5


class Doubled(nn.Dropout):
    def forward(self, input):
        return 2 * input


def hide_by_a_class_attribute(module, monkeypatch):
    monkeypatch.setattr(type(module.output), "dense", nn.Linear(88, 32).to(module.output.dense.weight), raising=False)


def hide_in_place_of_another_attribute(module, monkeypatch):
    """The class has as many as before."""
    kind = module.output.__class__ = type("Output", (Output,), {"other": None})
    module(torch.randn(3, 32, device=module.output.dense.weight.device))
    del kind.other
    kind.dense = nn.Linear(88, 32).to(module.output.dense.weight)


def take_the_hook_of_a_part(module, monkeypatch):
    module.output.dropout.register_forward_hook(lambda *args: 2 * args[-1])


# Beside those of test_changes.py in tests/fusing.
CHANGES = {
    "another dropout": lambda module, monkeypatch: setattr(module.output, "dropout", Doubled()),
    "a hook of the dropout": take_the_hook_of_a_part,
    "a class attribute": hide_by_a_class_attribute,
    "a class attribute for another": hide_in_place_of_another_attribute,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(fused_mlp, device, monkeypatch, change):
    """Whatever is changed after fusing counts at the next call, and what was changed back does too."""
    _, fused = fused_pair(fused_mlp, device)
    x = x_of(device)
    with torch.no_grad():
        CHANGES[change](fused, monkeypatch)
        got = fused(x), fused(x)
        expected = switched_back(copy.deepcopy(fused))(x)
    assert_close(got[0], expected)
    assert_close(got[1], expected)


def switched_back(module):
    """The module without anything fused: its class says what its code is."""
    for part in module.modules():
        for name in [name for name, value in vars(part).items() if isinstance(value, MethodType)]:
            del vars(part)[name]
    return module


def test_signatures_are_those_of_the_original(fused_mlp, device):
    """transformers counts the arguments of a layer's method; wrappers take over what a function says of itself."""
    module, fused = fused_pair(fused_mlp, device)
    assert inspect.signature(fused.forward) == inspect.signature(module.forward)

    @functools.wraps(fused.forward)
    def wrapper(x):
        return fused.forward(x)

    assert inspect.signature(wrapper) == inspect.signature(module.forward)


WATCHED = {
    "a hook of the head": lambda module: module.intermediate.register_forward_hook(lambda *_: None),
    "a hook of the tail": lambda module: module.output.register_forward_hook(lambda *_: None),
    "a backward hook": lambda module: module.output.register_full_backward_hook(lambda *_: None),
    "all modules": lambda module: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("how", WATCHED)
def test_what_watches_a_half_sees_it(fused_mlp, device, whole, how):
    module, fused = fused_pair(fused_mlp, device)
    whole.clear()
    handle, x = WATCHED[how](fused), x_of(device)
    try:
        with torch.no_grad():
            assert_close(fused(x), module(x))
        explanation = fused_mlp.explain(fused)
        assert len(whole) == (how == "a backward hook")  # which torch calls for nothing where nothing is recorded
        assert explanation.implementation != "fused" and "hooks" in explanation.reason
    finally:
        handle.remove()
    whole.clear()
    with torch.no_grad():
        assert_close(fused(x), module(x))
    assert len(whole) == 1 and fused_mlp.explain(fused).implementation == "fused"


def test_other_halves_are_explained(fused_mlp, device):
    _, fused = fused_pair(fused_mlp, device)
    fused.output = nn.Bilinear(88, 32, 32).to(device)
    assert fused_mlp.explain(fused).parts[0].reason == "calls output (a Bilinear)"
    fused.output = None
    assert fused_mlp.explain(fused).parts[0].reason == "calls output (a NoneType)"


def test_half_fused_before(fused_mlp, device, whole):
    """Who fuses a part first, or the whole twice, has the same in the end."""
    module = Halves().to(device).eval()
    fused_mlp.fuse_mlps(module.intermediate)
    first = fused_mlp.fuse_mlps(module)
    assert fused_mlp.fuse_mlps(module).modules == first.modules
    with torch.no_grad():
        module(x_of(device)), module(x_of(device))
    assert whole
    first.restore()
    assert fused_mlp.explain(module).implementation == "original"


def test_chunks_and_captured_outputs(fused_mlp, device, whole):
    """transformers hands a chunk of tokens to the method, and its hooks record what comes out of layers."""
    config = transformers.BertConfig(**LLM, chunk_size_feed_forward=3)
    model = transformers.BertModel(config).to(device).eval()
    inputs = {"input_ids": torch.randint(3, 64, (2, 9), device=device)}
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True)
        fused_mlp.fuse_mlps(model)
        model(**inputs)
        whole.clear()
        got = model(**inputs, output_hidden_states=True)
    assert whole == 2 * [(2, 9, 32), *3 * [(2, 3, 32)]]  # the end of attention first
    assert_close(list(got.hidden_states), list(expected.hidden_states))


def test_a_hook_of_a_half_is_compiled(fused_mlp, device):
    """test_traced.py in tests/fusing has the op of both."""
    module, fused = fused_pair(fused_mlp, device)
    fused.output.register_forward_hook(lambda part, args, output: 2 * output)
    torch.compiler.reset()
    with torch.no_grad():
        x = x_of(device)
        assert_close(torch.compile(fused, backend="eager", fullgraph=True)(x), 2 * module(x))


def test_programs_record_the_modules(fused_mlp, device):
    """torch.export and torch.jit.trace write down which module did what."""
    module, fused = fused_pair(fused_mlp, device)
    x = x_of(device)
    program = torch.export.export(fused, (x,))
    paths = {path for node in program.graph.nodes for path, _ in node.meta.get("nn_module_stack", {}).values()}
    assert {"intermediate", "output"} <= {path.rpartition(".")[2] for path in paths}
    with torch.no_grad():
        assert_close(program.module()(x), module(x))


class Shared(nn.Module):
    """The hidden values are read once more."""

    def __init__(self):
        super().__init__()
        self.intermediate, self.output = Intermediate(), Output()

    def forward(self, x):
        hidden = self.intermediate(x)
        return self.output(hidden, x) + hidden.mean()


class Reading(Output):
    """The tail reads the hidden values once more."""

    def forward(self, hidden_states, input_tensor):
        out = self.dense(hidden_states)
        return self.LayerNorm(out + input_tensor) * hidden_states.mean()


class Busy(Intermediate):
    """A head that does more than to compute hidden values, before it does."""

    def forward(self, hidden_states):
        self.calls = getattr(self, "calls", 0) + 1
        return self.intermediate_act_fn(self.dense(hidden_states))


def test_what_a_head_does_besides_is_done(fused_mlp, device, whole):
    module = Halves()
    module.intermediate = Busy()
    module, fused = fused_pair(fused_mlp, device, module)
    whole.clear()
    x = x_of(device)
    with torch.no_grad():
        assert_close(fused(x), module(x))
    assert len(whole) == 1
    assert (module.intermediate.calls, fused.intermediate.calls) == (1, 2)  # one of them in fused_pair()


@pytest.mark.parametrize("kind", [Shared, Reading], ids=lambda kind: kind.__name__)
def test_what_is_no_pair_of_halves(fused_mlp, device, kind):
    module = Shared() if kind is Shared else Halves()
    if kind is Reading:
        module.output = Reading()
    module = module.to(device).eval()
    plain, x = copy.deepcopy(module), x_of(device)
    end = [] if kind is Reading else ["linear with residual and norm"]  # what the tail is alone
    assert sorted(entry.pattern for entry in fused_mlp.fuse_mlps(module).fused) == ["linear", *end]
    assert_close(module(x), plain(x))


def test_types_are_covered():
    assert set(TYPES) <= set(tiny.model_types()) and len(TYPES) >= 12
