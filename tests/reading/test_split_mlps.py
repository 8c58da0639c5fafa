"""MLPs with halves in two modules run as one op, and as two modules as soon as anything watches their calls."""

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

# Model types, and the class that calls the halves.
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
    """Collects the input shapes of whole MLPs that run as one op, with or without their block."""
    taken = []
    tell_ops(lambda name, given: taken.append(tuple(given[0].shape)) if name in ("mlp", "residual_mlp") else None)
    return taken


@pytest.mark.parametrize("model_type", TYPES)
def test_models(fused_mlp, device, whole, model_type):
    """Each layer runs as one op with the same outputs; test_coverage.py covers training and `restore`."""
    model = built(model_type).to(device)
    inputs = {name: value.to(device) for name, value in inputs_of(model).items()}
    with torch.no_grad():
        expected = model(**inputs)[0]
        fused = fused_mlp.fuse_mlps(model).fused
        joined = [entry for entry in fused if entry.pattern.startswith("plain in two modules")]
        ends = [entry for entry in fused if entry.pattern == "linear with residual and norm"]  # the ends of attention
        assert {(entry.class_name, entry.extent) for entry in joined} == {(TYPES[model_type], "full")}
        model(**inputs)  # the first call learns the activation's class
        whole.clear()
        assert largest_error([model(**inputs)[0]], [expected]) <= 5e-5
    assert len(whole) == len(joined) + len(ends)


def fused_pair(fused_mlp, device, module=None):
    return warmed(fused_mlp, (module or Halves()).to(device).eval(), x_of(device), pattern="plain in two modules")


def test_dropout_that_is_active_is_applied(fused_mlp, device, whole):
    """Active dropout after the last projection is applied by the tail's own code."""
    module, fused = fused_pair(fused_mlp, device)
    module.output.dropout.train(), fused.output.dropout.train()
    whole.clear()
    x = x_of(device)
    with torch.no_grad():
        assert_close(*alike(lambda each: each(x), fused, module))
    assert len(whole) == 1


@pytest.mark.parametrize("model_type", ["deberta", "data2vec-vision"])  # with and without a sum and a norm
def test_little_work_that_autograd_follows_is_left_at_once(fused_mlp, device, monkeypatch, model_type):
    """Under autograd, too little work is left in compiled code: both modules are called as written."""
    model = built(model_type).to(device)
    inputs = {name: value.to(device) for name, value in inputs_of(model).items()}
    expected = model(**inputs)[0]
    fused_mlp.fuse_mlps(model)
    model(**inputs)  # the first call learns the activation's class
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
    """Hides `dense` while the class keeps its number of attributes."""
    kind = module.output.__class__ = type("Output", (Output,), {"other": None})
    module(torch.randn(3, 32, device=module.output.dense.weight.device))
    del kind.other
    kind.dense = nn.Linear(88, 32).to(module.output.dense.weight)


def take_the_hook_of_a_part(module, monkeypatch):
    module.output.dropout.register_forward_hook(lambda *args: 2 * args[-1])


# In addition to those of tests/fusing/test_changes.py.
CHANGES = {
    "another dropout": lambda module, monkeypatch: setattr(module.output, "dropout", Doubled()),
    "a hook of the dropout": take_the_hook_of_a_part,
    "a class attribute": hide_by_a_class_attribute,
    "a class attribute for another": hide_in_place_of_another_attribute,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(fused_mlp, device, monkeypatch, change):
    """Any change after fusing takes effect at the next call, and so does its reversal."""
    _, fused = fused_pair(fused_mlp, device)
    x = x_of(device)
    with torch.no_grad():
        CHANGES[change](fused, monkeypatch)
        got = fused(x), fused(x)
        expected = switched_back(copy.deepcopy(fused))(x)
    assert_close(got[0], expected)
    assert_close(got[1], expected)


def switched_back(module):
    """Returns the module with its fused methods removed, so that it runs its class's code."""
    for part in module.modules():
        for name in [name for name, value in vars(part).items() if isinstance(value, MethodType)]:
            del vars(part)[name]
    return module


def test_signatures_are_those_of_the_original(fused_mlp, device):
    """Fused methods have the original's signature: transformers counts a method's arguments, and wrappers copy it."""
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
        assert len(whole) == (how == "a backward hook")  # torch does not call it unless autograd records
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
    """Fusing a part first, or the whole twice, gives the same result as fusing once."""
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
    """Chunks of tokens and transformers' hooks that record layer outputs work as unfused."""
    config = transformers.BertConfig(**LLM, chunk_size_feed_forward=3)
    model = transformers.BertModel(config).to(device).eval()
    inputs = {"input_ids": torch.randint(3, 64, (2, 9), device=device)}
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True)
        fused_mlp.fuse_mlps(model)
        model(**inputs)
        whole.clear()
        got = model(**inputs, output_hidden_states=True)
    assert whole == 2 * [(2, 9, 32), *3 * [(2, 3, 32)]]  # the first is the end of attention
    assert_close(list(got.hidden_states), list(expected.hidden_states))


def test_a_hook_of_a_half_is_compiled(fused_mlp, device):
    """A compiled model runs a hook of a half; tests/fusing/test_traced.py covers the op."""
    module, fused = fused_pair(fused_mlp, device)
    fused.output.register_forward_hook(lambda part, args, output: 2 * output)
    torch.compiler.reset()
    with torch.no_grad():
        x = x_of(device)
        assert_close(torch.compile(fused, backend="eager", fullgraph=True)(x), 2 * module(x))


def test_programs_record_the_modules(fused_mlp, device):
    """torch.export records the modules that the operations belong to."""
    module, fused = fused_pair(fused_mlp, device)
    x = x_of(device)
    program = torch.export.export(fused, (x,))
    paths = {path for node in program.graph.nodes for path, _ in node.meta.get("nn_module_stack", {}).values()}
    assert {"intermediate", "output"} <= {path.rpartition(".")[2] for path in paths}
    with torch.no_grad():
        assert_close(program.module()(x), module(x))


class Shared(nn.Module):
    """Reads the hidden values again after the halves."""

    def __init__(self):
        super().__init__()
        self.intermediate, self.output = Intermediate(), Output()

    def forward(self, x):
        hidden = self.intermediate(x)
        return self.output(hidden, x) + hidden.mean()


class Reading(Output):
    """A tail that reads the hidden values twice."""

    def forward(self, hidden_states, input_tensor):
        out = self.dense(hidden_states)
        return self.LayerNorm(out + input_tensor) * hidden_states.mean()


class Busy(Intermediate):
    """A head that has a side effect before it computes the hidden values."""

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
    assert (module.intermediate.calls, fused.intermediate.calls) == (1, 2)  # fused_pair() made the other call


@pytest.mark.parametrize("kind", [Shared, Reading], ids=lambda kind: kind.__name__)
def test_what_is_no_pair_of_halves(fused_mlp, device, kind):
    module = Shared() if kind is Shared else Halves()
    if kind is Reading:
        module.output = Reading()
    module = module.to(device).eval()
    plain, x = copy.deepcopy(module), x_of(device)
    end = [] if kind is Reading else ["linear with residual and norm"]  # the tail's own pattern
    assert sorted(entry.pattern for entry in fused_mlp.fuse_mlps(module).fused) == ["linear", *end]
    assert_close(module(x), plain(x))


def test_types_are_covered():
    assert set(TYPES) <= set(tiny.model_types()) and len(TYPES) >= 12
