"""Fused models under torch.compile: the guards that Dynamo adds, and the recorded operations that become one op."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
import transformers
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from modules import Gated, Halves, OwnLinears, PackedGated, Plain
from safety import assert_close, x_of
from tiny_models import LLM

# Largest number of guard lines that fusing may add to a whole model; most concern the methods that its modules hold.
GUARDS = {"bert": 215, "gpt2": 105}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


class Graphs:
    """A backend that runs recorded graphs and keeps copies of them without dead code."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example):
        self.graphs.append(copy.deepcopy(graph.graph))
        self.graphs[-1].eliminate_dead_code()
        return graph

    def ops(self):
        """Returns the names of our ops in the latest graph, and the number of other matrix products."""
        nodes = [node for node in self.graphs[-1].nodes if node.op == "call_function"]
        names = [getattr(node.target, "__name__", "") for node in nodes if "fused_mlp" in str(node.target)]
        return [name.split(".")[0] for name in names], sum(node.target in (F.linear, torch.addmm) for node in nodes)


def compiled(module):
    backend = Graphs()
    return torch.compile(module, backend=backend, fullgraph=True), backend


def guard_lines(model, **inputs):
    torch.compiler.reset()
    run, _ = compiled(model)
    with torch.no_grad():
        run(**inputs)
    entries = _debug_get_cache_entry_list(type(model).forward.__code__)
    return len(str(entries[0].guard_manager).splitlines())


@pytest.mark.parametrize("name", GUARDS)
def test_guards(fused_mlp, device, name):
    """Fusing adds few guards to a model, counted over all layers."""
    layers = 3
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": layers, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    model = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**LLM | {"num_hidden_layers": layers})),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False)),
    }[name]()
    model = model.to(device).eval()
    inputs = {"input_ids": torch.randint(3, 64, (2, 9), device=device)}
    unfused = guard_lines(model, **inputs)
    assert fused_mlp.fuse_mlps(model).fused
    assert guard_lines(model, **inputs) - unfused <= GUARDS[name]


@pytest.mark.parametrize(("kind", "name"), [(Gated, "forward"), (Halves, "feed_forward_chunk")])
def test_a_class_that_is_patched_after_compiling(fused_mlp, device, monkeypatch, kind, name):
    module, x = kind().to(device).eval(), x_of(device)
    fused_mlp.fuse_mlps(module)
    run, original = torch.compile(module, backend="eager"), getattr(kind, name)
    expected = run(x)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, lambda self, x: 2 * original(self, x))
        assert_close(run(x), 2 * expected)
    assert_close(run(x), expected)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("memory", ["activations", "recompute"])
@pytest.mark.parametrize("kind", [Gated, PackedGated, Plain, OwnLinears, Halves, nn.Sequential])
def test_one_op(fused_mlp, device, kind, memory, training):
    parts = (nn.Linear(32, 88), nn.GELU(), nn.Dropout(0.0), nn.Linear(88, 32))
    module = (kind(*parts) if kind is nn.Sequential else kind(bias=kind is not OwnLinears)).to(device).eval()
    fused = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(fused, memory=memory).fused
    run, backend = compiled(fused)
    x = x_of(device)
    # On a GPU in training, ungated MLPs are the compiler's unless the ops are forced.
    with torch.set_grad_enabled(training), fused_mlp.backend(device.type if training else "auto"):
        assert_close(run(x), module(x))
    op = "training_forward" if training else "gated_mlp" if kind in (Gated, PackedGated) else "mlp"
    assert backend.ops() == ([op], 0)


@pytest.mark.parametrize("least", [88 * 32 * 10, 88 * 32 * 11])
def test_little_work_is_the_compilers(fused_mlp, device, monkeypatch, least):
    """With 10 rows in training, only plain MLPs are left to the compiler, and not if they are fused to save memory."""
    dispatch = importlib.import_module(f"{fused_mlp.__name__}.dispatch")
    monkeypatch.setattr(dispatch, "LEAST_COMPILED", least)
    x, is_left = x_of(device, 2, 5), least > 88 * 32 * 10
    for kind, memory, op in (
        (Plain, "activations", None if is_left else "training_forward"),
        (Plain, "recompute", "training_forward"),
        (Gated, "activations", "training_forward"),
    ):
        torch.compiler.reset()
        module = kind().to(device).train()
        report = fused_mlp.fuse_mlps(module, memory=memory)
        rows = f"fused in training under torch.compile with at least {least // (88 * 32)} rows"
        assert (
            (rows in str(report))
            == (rows in str(fused_mlp.explain(module)))
            == ((kind, memory) == (Plain, "activations"))
        )
        run, backend = compiled(module)
        run(x).sum().backward()
        assert backend.ops() == (([], 2) if op is None else ([op], 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_that_no_kernel_reads(fused_mlp, device, monkeypatch, dtype):
    """torch runs the first product of GPT-2's MLP with its activation; the compiler runs the second."""
    if device.type == "cpu":  # on a CPU, ops read all weights, and torch has this product with exact GELU
        native = importlib.import_module(f"{fused_mlp.__name__}.backends.native")
        monkeypatch.setattr(native, "reads", lambda weight: weight.stride(1) == 1)
    module = GPT2MLP(88, transformers.GPT2Config(n_embd=32)).to(device, dtype).eval()
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    (run, backend), x = compiled(fused), x_of(device).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x), rtol=1e-2, atol=1e-3)
        of_torch = [node.target for node in backend.graphs[-1].nodes if "_addmm_activation" in str(node.target)]
        assert (len(of_torch), *backend.ops()) == ((1, [], 1) if dtype == torch.bfloat16 else (0, [], 2))
        with fused_mlp.backend(device.type):
            torch.testing.assert_close(run(x), module(x), rtol=1e-2, atol=1e-3)
            assert backend.ops() == (["mlp"], 0)


CHANGES = {
    "a forward of a projection": lambda module: setattr(module.fc1, "forward", lambda x: x @ module.fc1.weight.t()),
    "a forward of the activation": lambda module: setattr(module.activation_fn, "forward", torch.sin),
    "another activation": lambda module: setattr(module, "activation_fn", nn.SiLU()),
    "an option of the activation": lambda module: setattr(module.activation_fn, "approximate", "tanh"),
    "another weight": lambda module: setattr(module.fc1, "weight", nn.Parameter(torch.ones_like(module.fc1.weight))),
    "values of a weight": lambda module: module.fc2.weight.data.mul_(2.0),
    "no bias": lambda module: setattr(module.fc2, "bias", None),
    "another projection": lambda module: setattr(module, "fc2", nn.Sequential(module.fc2, nn.Tanh())),
    "what wants a gradient": lambda module: module.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_compiling(fused_mlp, device, change):
    """Changes after compiling take effect as without fusing, by Dynamo's guards on the code as written."""
    module = Plain().to(device).requires_grad_(False)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    (run, backend), x = compiled(fused), x_of(device)
    assert_close(run(x), module(x))
    assert backend.ops() == (["mlp"], 0)
    for each in (module, fused):
        CHANGES[change](each)
        each.to(device)
    got, expected = run(x), module(x)
    assert got.requires_grad == expected.requires_grad
    assert_close(got.detach(), expected.detach())


def test_patched_after_compiling(fused_mlp, device, monkeypatch):
    module = Plain().to(device)
    fused_mlp.fuse_mlps(module)
    (run, _), x = compiled(module), x_of(device)
    with torch.no_grad():
        before = run(x)
        monkeypatch.setattr(F, "linear", lambda *given, linear=F.linear: 2.0 * linear(*given))
        assert not torch.allclose(run(x), before)
        assert_close(run(x), module(x))


def test_a_backend_forced_after_compiling(fused_mlp, device):
    module = Plain().to(device)
    fused_mlp.fuse_mlps(module)
    (run, backend), x = compiled(module), x_of(device)
    with torch.no_grad():
        run(x)
        with fused_mlp.backend("torch"):
            run(x)
            assert backend.ops() == ([], 2)
        count = len(backend.graphs)
        run(x)
    assert len(backend.graphs) == count


def test_a_class_patched_before_compiling(fused_mlp, device, monkeypatch):
    module = Plain().to(device)
    fused_mlp.fuse_mlps(module)
    monkeypatch.setattr(Plain, "forward", lambda self, hidden_states: self.fc1(hidden_states) + 1.0)
    x = x_of(device)
    with torch.no_grad():
        assert_close(torch.compile(module, backend="aot_eager")(x), module.fc1(x) + 1.0)


def test_hidden_values_that_a_hook_sees(fused_mlp, device):
    """Hooks that change the hidden values, read them or keep the activation's input see the right values."""
    kept = []
    hooks = (
        lambda part, args, output: output + 1.0,
        lambda part, args, output: kept.append(output.sum()),
        lambda part, args, output: kept.append(output),
    )
    for hook in hooks:
        torch.compiler.reset()
        module = Plain().to(device)
        fused_mlp.fuse_mlps(module)
        run, x = compiled(module)[0], x_of(device)
        module.fc1.register_forward_hook(hook)
        with torch.no_grad():
            assert_close(run(x), module(x))
    assert_close(kept[0], kept[1])
    assert_close(kept[2], kept[3])


@pytest.mark.parametrize("name", ["_fuse", "_are_alike", "comptime"])
def test_a_torch_that_records_in_another_way(fused_mlp, device, monkeypatch, name):
    """If torch records differently, methods stay as recorded, and a warning gives the reason."""
    module = Plain().to(device)
    fused_mlp.fuse_mlps(module)
    if name == "comptime":
        monkeypatch.delattr(torch._dynamo.comptime, name)
    else:
        traced = importlib.import_module(f"{fused_mlp.__name__}.models.methods.traced")
        monkeypatch.setattr(traced, name, lambda *given: given[99])
    (run, backend), x = compiled(module), x_of(device)
    with torch.no_grad(), pytest.warns(UserWarning, match="nothing is fused under torch.compile"):
        assert_close(run(x), module(x))
    assert backend.ops() == ([], 2)


class Broken(Plain):
    def forward(self, hidden_states):
        hidden = self.activation_fn(self.fc1(hidden_states))
        torch._dynamo.graph_break()
        return self.fc2(hidden)


def test_a_graph_break(fused_mlp, device):
    module = nn.Sequential(Broken(), Plain()).to(device)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    backend, x = Graphs(), x_of(device)
    run = torch.compile(fused, backend=backend)
    for _ in range(2):
        with torch.no_grad():
            assert_close(run(x), module(x))
    assert_close(run(x).detach(), module(x).detach())


def in_place(self, x):
    hidden = self.fc1(x)
    x.add_(1.0)
    return self.fc2(self.act(hidden)) + x


def under_another_dtype(self, x):
    return self.fc2(self.act(self.fc1(x).double()).to(x.dtype))


def used_twice(self, x):
    hidden = self.fc1(x)
    return self.fc2(self.act(hidden)) + hidden.mean()


def with_dropout(self, x):
    return self.fc2(F.dropout(self.act(self.fc1(x)), 0.5, True))


def between(self, x):
    hidden = self.act(self.fc1(x))
    self.fc2.bias.data.add_(1.0)
    return self.fc2(hidden)


@pytest.mark.parametrize("forward", [in_place, used_twice, with_dropout, between], ids=lambda f: f.__name__)
def test_what_is_left(fused_mlp, device, forward):
    """Parts with something between them or with other users are not fused into one op, and the result is right."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.act = nn.Linear(32, 88), nn.Linear(88, 32), nn.GELU()

    Module.forward = forward
    module = Module().to(device)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    run, backend = compiled(fused)
    x = x_of(device)
    with torch.no_grad():
        torch.manual_seed(0)
        got = run(x.clone())
        torch.manual_seed(0)
        assert_close(got, module(x.clone()))
    assert "mlp" not in backend.ops()[0]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_autocast(fused_mlp, device, training):
    module = Gated(bias=True).to(device)
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    run, backend = compiled(fused)
    x = x_of(device)
    with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(training):
        got, expected = run(x), module(x)
    assert got.dtype == expected.dtype
    assert_close(got.detach(), expected.detach(), tolerance=2e-2)
    assert backend.ops() == (["training_forward" if training else "gated_mlp"], 0)


def test_rows_that_vary(fused_mlp, device):
    for kind in (Gated, Plain):
        torch.compiler.reset()
        module = kind(bias=True).to(device)
        fused = copy.deepcopy(module)
        fused_mlp.fuse_mlps(fused)
        run, backend = compiled(fused)
        with torch.no_grad():
            for rows in (3, 5, 8, 2):
                x = x_of(device, rows, 4)
                assert_close(run(x), module(x))
        assert len(backend.graphs) == 2 and len(backend.ops()[0]) == 1


def test_a_graph_of_training_has_ops_that_autograd_does_not_know(fused_mlp, device):
    """Training graphs hold ops without an autograd kernel: Python ones would enter Python whenever the graph runs."""
    module, seen = Gated().to(device).train(), []
    fused_mlp.fuse_mlps(module)

    def noted(graph, given):
        seen.extend(node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        return make_boxed_func(graph)

    run = torch.compile(module, backend=aot_autograd(fw_compiler=noted))
    with fused_mlp.backend(device.type):
        run(x_of(device)).sum().backward()
    ours = {op._opname: op for op in seen if "fused_mlp" in op.namespace}
    assert ours.keys() == {"graph_training_forward", "training_backward"}
    assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Autograd") for op in ours.values())
