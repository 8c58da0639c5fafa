"""fuse_mlps on transformers' own models, and on look-alikes that it must leave alone."""

import copy
import dataclasses
import importlib
import inspect
import io
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import look_alikes
from modules import PROJECTIONS, WRAPPERS, Gated, Plain, TanhGelu

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

# Model, configuration, and what is fused: the class of its MLPs, their number, the pattern.
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
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", IMAGES, ("SiglipMLP", None, "plain")),
    "ViT": ("ViTModel", "ViTConfig", IMAGES, (None, 2, None)),
    "BERT": ("BertModel", "BertConfig", LLM, ("BertIntermediate", 2, "linear")),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 88, "n_layers": 2, "n_heads": 4},
        ("FFN", 2, "plain"),
    ),
    "T5": ("T5EncoderModel", "T5Config", T5, ("T5DenseActDense", 2, "linear")),
    "T5 gated": (
        "T5EncoderModel",
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu"},
        ("T5DenseGatedActDense", 2, "gated linear"),
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


def paths(reports):
    return {report.path for report in reports}


@pytest.mark.parametrize("name", MODELS)
def test_models(fused_mlp, device, name):
    """Outputs and gradients of the fused model, and the report."""
    model, inputs = build(name, device)
    before = outcome(model, inputs)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = fused_mlp.fuse_mlps(model)
    torch.testing.assert_close(outcome(model, inputs), before, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], before[0], rtol=1e-3, atol=1e-5)

    class_name, count, pattern = MODELS[name][3]
    assert len(report.fused) == (count or len(report.fused)) > 0
    for fused in report.fused:
        assert fused.class_name == type(model.get_submodule(fused.path)).__name__ == (class_name or fused.class_name)
        assert fused.pattern == (pattern or fused.pattern)
        assert fused.reason == "GEMMs and activation"
        assert fused_mlp.explain(model.get_submodule(fused.path)).implementation == "fused"
    assert all(left.reason for left in report.left)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_models_in_bfloat16(fused_mlp, device, name):
    model, inputs = build(name, device, torch.bfloat16)
    with torch.no_grad():
        expected = model(**inputs)[0].float()
        report = fused_mlp.fuse_mlps(model)
        got = model(**inputs)[0].float()
    assert report.fused
    assert (got - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("name", ["Gemma", "Phi3", "GPT-2", "BERT"])
def test_a_fused_model_compiles(fused_mlp, device, name):
    torch.compiler.reset()
    model, inputs = build(name, device)
    expected = outcome(model, inputs)
    fused_mlp.fuse_mlps(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    output = compiled(**inputs)[0]
    output.square().mean().backward()
    torch.testing.assert_close(output.detach(), expected[0], rtol=1e-3, atol=1e-5)
    for path, parameter in model.named_parameters():
        if path in expected[1]:
            torch.testing.assert_close(parameter.grad, expected[1][path], rtol=1e-3, atol=1e-5)


def test_generation(fused_mlp, device):
    model, inputs = build("Llama", device)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    fused_mlp.fuse_mlps(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), expected)


def test_a_projection_that_stays_in_float32(fused_mlp, device):
    """T5 keeps `wo` in float32 where the model is in 16 bits, and casts before it."""
    model, inputs = build("T5 gated", device, torch.bfloat16)
    for block in model.encoder.block:
        block.layer[1].DenseReluDense.wo.float()
    with torch.no_grad():
        expected = model(**inputs)[0].float()
        report = fused_mlp.fuse_mlps(model)
        got = model(**inputs)[0].float()
    assert {fused.pattern for fused in report.fused} == {"gated linear"}
    assert (got - expected).norm() <= 2e-2 * expected.norm()


def test_gradient_checkpointing(fused_mlp, device):
    model, inputs = build("Llama", device)
    before = outcome(model.train(), inputs)
    fused_mlp.fuse_mlps(model)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(outcome(model, inputs), before, rtol=1e-3, atol=1e-5)


# Reports.


def test_report(fused_mlp, device):
    """BERT: its intermediates are fused, its pooler (dense and tanh) is left with a reason."""
    model, _ = build("BERT", device)
    report = fused_mlp.fuse_mlps(model)
    assert paths(report.fused) == {f"encoder.layer.{i}.intermediate" for i in range(2)}
    assert paths(report.left) == {"pooler"}
    assert "Tanh" in report.left[0].reason
    assert report.modules == [*report.fused, *report.left]
    lines = str(report).splitlines()
    assert lines[0] == "2 fused, 1 left"
    assert lines[1].split() == ["class", "pattern", "fused", "reason", "modules"]
    assert len(lines) == 4  # alike modules share a line
    for word in ("BertIntermediate", "linear", "yes", "encoder.layer.0.intermediate ... encoder.layer.1.intermediate"):
        assert word in lines[2]
    for word in ("BertPooler", "no", report.left[0].reason, "pooler"):
        assert word in lines[3]


def test_a_model_without_mlps(fused_mlp):
    report = fused_mlp.fuse_mlps(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    assert report.modules == []
    assert str(report).startswith("0 fused, 0 left")


def test_the_module_itself(fused_mlp, device):
    module = Gated().to(device)
    report = fused_mlp.fuse_mlps(module)
    assert [(entry.path, entry.class_name) for entry in report.fused] == [("", "Gated")]


def test_one_module_at_two_places(fused_mlp, device):
    shared = Gated().to(device)
    model = nn.Sequential(shared, shared)
    x = torch.randn(3, 32, device=device)
    expected = model(x)
    assert len(fused_mlp.fuse_mlps(model).modules) == 1
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_restore(fused_mlp, device, name):
    model, inputs = build(name, device)
    expected = outcome(model, inputs)
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    report = fused_mlp.fuse_mlps(model)
    report.restore()
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    for entry in report.fused:
        assert fused_mlp.explain(model.get_submodule(entry.path)).implementation == "original"
    torch.testing.assert_close(outcome(model, inputs), expected, rtol=0, atol=0)
    report.restore()  # nothing left to do
    assert len(fused_mlp.fuse_mlps(model).fused) == len(report.fused)


def test_fused_twice(fused_mlp, device):
    model, inputs = build("Llama", device)
    expected = outcome(model, inputs)
    first = fused_mlp.fuse_mlps(model)
    second = fused_mlp.fuse_mlps(model)
    assert paths(second.left) == paths(first.fused)
    assert {left.reason for left in second.left} == {"already fused"}
    second.restore()  # what the first call did stays
    assert fused_mlp.explain(model.model.layers[0].mlp).implementation == "fused"
    torch.testing.assert_close(outcome(model, inputs), expected, rtol=1e-3, atol=1e-5)
    first.restore()
    assert fused_mlp.explain(model.model.layers[0].mlp).implementation == "original"


@pytest.mark.parametrize("what", [None, "model", [Gated()], {"model": 1}, Gated], ids=lambda what: type(what).__name__)
def test_what_is_no_module(fused_mlp, what):
    with pytest.raises(TypeError, match=rf"(?=.*model)(?=.*Module)(?=.*{type(what).__name__})"):
        fused_mlp.fuse_mlps(what)


# Copies of fused modules.


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_deepcopy(fused_mlp, device, kind):
    """The copy uses its own weights, not those of what it was copied from."""
    module = kind().to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    expected = module(x)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(x), expected)
    assert fused_mlp.explain(twin).implementation == "fused"


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_pickle(fused_mlp, device, kind):
    """What is saved loads anywhere, also without this package: with the original forward, to be fused again."""
    module = kind().to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    assert fused_mlp.__name__.encode() not in pickle.dumps(module)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for twin in (pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)):
        torch.testing.assert_close(twin(x), module(x))
        assert fused_mlp.explain(twin).implementation == "original"
        assert len(fused_mlp.fuse_mlps(twin).fused) == 1
        torch.testing.assert_close(twin(x), module(x))


def test_state_dicts_fit_both_ways(fused_mlp, device):
    fused, plain = Gated(bias=True).to(device), Gated(bias=True).to(device)
    fused_mlp.fuse_mlps(fused)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(3, 32, device=device)
    torch.testing.assert_close(fused(x), plain(x))
    plain.load_state_dict(fused.state_dict())


def test_moved_after_fusing(fused_mlp, device):
    module = Gated()
    fused_mlp.fuse_mlps(module)
    module.to(device, torch.bfloat16)
    plain = copy.deepcopy(module)
    plain.forward = Gated.forward.__get__(plain)
    x = torch.randn(8, 32, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(module(x), plain(x), rtol=3e-2, atol=3e-2)


# Look-alikes: the structure of an MLP, another function.


def behaviour(module, x):
    """What a module does with an input, in evaluation and in training: results, gradients, state, the input itself."""
    seen = []
    for training in (False, True):
        module.train(training).zero_grad()
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        result = module(given + 0)
        results = [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]
        if results[0].requires_grad:
            sum(part.square().sum() for part in results).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        seen += [*results, given.grad, *gradients, *module.buffers(), torch.tensor(getattr(module, "calls", 0))]
        with torch.no_grad():
            inputs = x.clone()
            torch.manual_seed(0)
            result = module(inputs)
            seen += [inputs, *(result if isinstance(result, tuple) else (result,))]
    return [part.detach().clone() if isinstance(part, torch.Tensor) else part for part in seen]


def assert_alike(got, expected, **tolerance):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("kind", look_alikes.ALL)
def test_look_alikes(fused_mlp, device, kind, verify):
    """Nothing but what the code says is fused, with or without a comparison; and what it computes stays the same."""
    module = kind(bias=True).to(device)
    x = torch.randn(4, 32, device=device)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module, verify=verify)
    assert_alike(behaviour(module, x), behaviour(plain, x), rtol=1e-3, atol=1e-4)
    assert len(report.modules) == 1
    if kind.fused is None:
        assert report.fused == [] and report.left[0].reason
        assert "forward" not in vars(module)
        assert fused_mlp.explain(module).implementation == "original"
    else:
        assert [fused.pattern for fused in report.fused] == [kind.fused]
        report.restore()
        assert_alike(behaviour(module, x), behaviour(plain, x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", look_alikes.ALL)
def test_look_alikes_compile(fused_mlp, device, kind):
    """As PyTorch compiles them, with the results of the original."""
    torch.compiler.reset()
    module = kind(bias=True).to(device).eval()
    x = torch.randn(4, 32, device=device)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = copy.deepcopy(module)(x)
        fused_mlp.fuse_mlps(module)
        compiled = torch.compile(module, backend="eager")
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sparsities", [(0.5, 0.0), (0.0, 0.5)], ids=str)
def test_what_an_attribute_decides(fused_mlp, device, sparsities):
    """Two instances of one class that compute different things, and each of them after a change."""
    model = nn.Sequential(*(look_alikes.Configurable(sparsity) for sparsity in sparsities)).to(device)
    plain = copy.deepcopy(model)
    fused_mlp.fuse_mlps(model)
    x = torch.randn(3, 32, device=device)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
        for module in (*model, *plain):
            module.activation_sparsity = 0.5 - module.activation_sparsity


class Detector(nn.Module):
    """A head whose layers are in a loop, as those of DETR."""

    def __init__(self, widths=(32, 40, 48, 4)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


class Decoder(nn.Module):
    """A layer with its MLP written inline, and more arguments than one."""

    def __init__(self, act=nn.GELU):
        super().__init__()
        self.self_attn = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.fc1, self.fc2 = nn.Linear(32, 88), nn.Linear(88, 32)
        self.activation_fn = act()
        self.activation_dropout = self.dropout = 0.1

    def forward(self, hidden_states, mask=None, *rest, scale=1.0, **options):
        hidden_states = hidden_states + self.self_attn(hidden_states if mask is None else hidden_states * mask)
        residual = hidden_states
        hidden_states = self.activation_fn(self.fc1(self.norm(hidden_states)))
        hidden_states = F.dropout(hidden_states, p=self.activation_dropout, training=self.training)
        hidden_states = self.fc2(hidden_states)
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        return scale * (residual + hidden_states), rest, options


class Chunked(Plain):
    """Its MLP is in a method that another function calls."""

    def ff_chunk(self, x):
        return self.fc2(self.activation_fn(self.fc1(x)))

    def forward(self, x):
        return torch.cat([self.ff_chunk(part) for part in x.split(1)])


class Inherited(Plain):
    """Its code reads names around it, and a string over several lines."""

    def forward(self, x):
        """A string
        of two lines."""
        return self.fc2(self.activation_fn(self.fc1(super().forward(Plain.forward(self, x)))))


def outer_function(self, x):
    return self.fc2(self.activation_fn(self.fc1(x)))


class Borrowed(Plain):
    """Its method was written elsewhere, under another name."""

    chunk = outer_function

    def forward(self, x):
        return self.chunk(x)


def sequence(*parts):
    return lambda: nn.Sequential(*(part() for part in parts))


def first(*sizes):
    return lambda: nn.Linear(*sizes)


FORMS = {
    "inline": (Decoder, "plain"),
    "method": (Chunked, "plain"),
    "closure": (Inherited, "plain"),
    "function": (Borrowed, "plain"),
    "loop": (Detector, "linear"),
    "sequence": (sequence(first(32, 88), nn.GELU, first(88, 32)), "plain"),
    "sequence with dropout": (sequence(first(32, 88), nn.SiLU, nn.Dropout, nn.Identity, first(88, 32)), "plain"),
    "half a sequence": (sequence(lambda: nn.LayerNorm(32), first(32, 88), nn.ReLU, lambda: nn.LayerNorm(88)), "linear"),
    "long sequence": (sequence(first(32, 8), nn.ReLU, first(8, 16), nn.ReLU, first(16, 4)), "linear, plain"),
}


def refused(fused_mlp, module):
    """A pickled copy, fused again."""
    copied = pickle.loads(pickle.dumps(module))
    assert fused_mlp.explain(copied).implementation == "original"
    assert fused_mlp.fuse_mlps(copied).fused
    return copied


@pytest.mark.parametrize("form", FORMS)
def test_forms(fused_mlp, device, form):
    """MLPs that are no module of their own, or no code of their own."""
    make, pattern = FORMS[form]
    module = make().to(device)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module)
    assert [fused.pattern for fused in report.fused] == [pattern]
    x = torch.randn(4, 32, device=device)
    for candidate in (module, copy.deepcopy(module), refused(fused_mlp, module)):
        results = []
        for each in (candidate, plain):
            each.zero_grad()
            torch.manual_seed(0)
            trained = each.train()(x)
            (trained[0] if isinstance(trained, tuple) else trained).square().sum().backward()
            results.append([trained, [p.grad.clone() for p in each.parameters()], each.eval()(x)])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert fused_mlp.explain(module).implementation == "fused"
    report.restore()
    assert fused_mlp.explain(module).implementation == "original"
    assert torch.equal(*(part[0] if isinstance(part, tuple) else part for part in (module(x), plain(x))))


def test_arguments_of_an_inline_mlp(fused_mlp, device):
    module = Decoder().to(device).eval()
    plain = copy.deepcopy(module)
    fused_mlp.fuse_mlps(module)
    x, mask = torch.randn(2, 32, device=device), torch.rand(32, device=device)
    for args, kwargs in (
        ((x,), {}),
        ((x, mask), {"scale": 3.0}),
        ((x, mask, 5, 6), {"scale": 2.0, "other": 7}),
        ((), {"hidden_states": x, "mask": mask}),
    ):
        torch.testing.assert_close(module(*args, **kwargs), plain(*args, **kwargs))
    for call in (lambda module: module(), lambda module: module(x, hidden_states=x)):
        with pytest.raises(TypeError) as of_fused:
            call(module)
        with pytest.raises(TypeError) as of_plain:
            call(plain)
        assert str(of_fused.value) == str(of_plain.value)


def test_parts_of_a_sequence_that_change(fused_mlp, device):
    """A sequence is fused as it is when it is called."""
    module = nn.Sequential(nn.Linear(32, 88), nn.GELU(), nn.Linear(88, 32)).to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(3, 32, device=device)
    module[1] = nn.Mish()
    torch.testing.assert_close(module(x), module[2](module[1](module[0](x))))
    module.append(nn.LayerNorm(32).to(device))
    del module[1]
    torch.testing.assert_close(module(x), module[2](module[1](module[0](x))))


def test_code_is_read_only_if_it_is_what_runs(fused_mlp, device):
    """A function whose source is another's, or nobody's, is left as it is."""

    class Edited(Plain):  # as when its file has changed since it was imported
        def forward(self, x):
            return self.fc2(self.activation_fn(self.fc1(x)))

        def doubled(self, x):
            return self.fc2(2 * self.activation_fn(self.fc1(x)))

    class Made(Plain):
        pass

    line = Edited.forward.__code__.co_firstlineno
    Edited.forward.__code__ = Edited.doubled.__code__.replace(co_firstlineno=line)
    del Edited.doubled
    exec("def forward(self, x):\n    return self.fc2(self.activation_fn(self.fc1(x)))", names := {})
    Made.forward = names["forward"]
    for kind in (Edited, Made):
        report = fused_mlp.fuse_mlps(kind().to(device))
        assert [left.reason for left in report.left] == ["the source of its forward cannot be had"]


def test_a_method_shows_its_own_lines(fused_mlp, device):
    """An error inside a fused method is found where the original has it."""
    module = Decoder().to(device)
    fused_mlp.fuse_mlps(module)
    module.norm = None
    with pytest.raises(TypeError) as caught:
        module(torch.randn(2, 32, device=device))
    assert "self.activation_fn(self.fc1(self.norm(hidden_states)))" in str(caught.traceback[-1].statement)
    assert inspect.signature(module.forward) == inspect.signature(Decoder().forward)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gated(nn.Mish), ["Mish", "not known"]),
        (lambda: Plain(nn.Tanh), ["Tanh", "not known"]),
        (lambda: Gated(nn.LeakyReLU), ["LeakyReLU"]),
        (look_alikes.NoActivation, ["does not apply its activation"]),
    ],
    ids=["mish", "tanh", "leaky", "no activation"],
)
def test_reasons(fused_mlp, device, make, words):
    report = fused_mlp.fuse_mlps(make().to(device))
    assert report.fused == []
    for word in words:
        assert word in report.left[0].reason


def test_a_forward_of_its_own(fused_mlp, device):
    module = Gated().to(device)
    original = module.forward
    module.forward = lambda x: 2 * original(x)
    report = fused_mlp.fuse_mlps(module)
    assert report.left[0].reason == "has a forward of its own"
    x = torch.randn(2, 32, device=device)
    torch.testing.assert_close(module(x), 2 * original(x))


class NoSuchActivation(nn.SiLU):
    """What the table takes for SiLU, if its class goes by that name."""

    def forward(self, input):
        return 1.1 * super().forward(input)


NoSuchActivation.__module__, NoSuchActivation.__qualname__ = nn.SiLU.__module__, nn.SiLU.__qualname__
NoSuchActivation.forward.__module__ = nn.SiLU.__module__


def test_verification(fused_mlp, device):
    """What does not compute what the table says is found out, unless nobody looks."""
    report = fused_mlp.fuse_mlps(Gated(NoSuchActivation).to(device))
    assert "computes something else" in report.left[0].reason
    assert fused_mlp.fuse_mlps(Gated(NoSuchActivation).to(device), verify=False).fused


def test_verification_of_a_whole_method(fused_mlp, device, monkeypatch):
    """What is put in the place of an MLP is run where it stands."""
    rewriting = importlib.import_module(f"{fused_mlp.__name__}.models.rewriting")
    call = rewriting._call

    def swapped(site):
        gate, up, down = site.projections
        return call(dataclasses.replace(site, projections=(up, gate, down)))

    monkeypatch.setattr(rewriting, "_call", swapped)
    monkeypatch.setattr(rewriting, "_rewritten", rewriting._rewritten.__wrapped__)  # which remembers
    report = fused_mlp.fuse_mlps(Gated().to(device))
    assert "its fused forward computes something else" in report.left[0].reason
    assert fused_mlp.fuse_mlps(Gated().to(device), verify=False).fused


class Counted(Gated):
    """An MLP that keeps account of what it sees, in all the ways there are."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.total += x.abs().sum()
        x = self.norm(x.flatten(0, -2)).view_as(x)
        x = self.dropout(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("training", [False, True])
def test_verification_runs_a_copy(fused_mlp, device, monkeypatch, training):
    verification = importlib.import_module(f"{fused_mlp.__name__}.models.verification")
    compared = []
    run = verification._outputs
    monkeypatch.setattr(
        verification, "_outputs", lambda method, module, x: compared.append(module.training) or run(method, module, x)
    )
    module = Counted().to(device).train(training)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    random_state = torch.get_rng_state(), [torch.cuda.get_rng_state()] if device.type == "cuda" else []
    assert fused_mlp.fuse_mlps(module).fused
    assert set(compared) == {False, True}
    assert (module.calls, module.training, module.norm.training) == (0, training, training)
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state[0])
    assert all(torch.equal(torch.cuda.get_rng_state(), state) for state in random_state[1])
    assert all(parameter.grad is None for parameter in module.parameters())


class Particular(Gated):
    """One that takes matrices alone, and counts its calls before it looks."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        _, _ = x.shape
        return self.calls * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_verification_starts_anew(fused_mlp, device):
    """An input that the original refuses leaves nothing behind for the next."""
    module = Particular().to(device)
    assert fused_mlp.fuse_mlps(module).fused
    assert module.calls == 0


def test_verification_leaves_no_trace(fused_mlp, device):
    """Neither in the random state, nor in gradients, nor in hooks, nor in the mode."""
    module = nn.Sequential(Gated(), Decoder(), Plain()).to(device).train()
    fired = []
    for part in module.modules():
        part.register_forward_hook(lambda *_: fired.append(1))
    before = torch.get_rng_state(), [torch.cuda.get_rng_state()] if device.type == "cuda" else []
    fused_mlp.fuse_mlps(module)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(torch.cuda.get_rng_state(), state) for state in before[1])
    assert fired == []
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_zero_weights(fused_mlp, device, kind):
    """A real MLP is recognised whatever its weights are, and uses the weights it has later."""
    module, plain = kind().to(device), kind().to(device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert fused_mlp.fuse_mlps(module).fused
    assert all(not parameter.any() for parameter in module.parameters())
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 32, device=device)
    torch.testing.assert_close(module(x), plain(x))


@pytest.mark.parametrize("fill", [torch.inf, torch.nan])
def test_weights_that_are_not_finite(fused_mlp, device, fill):
    """As memory that is yet to be loaded may hold: nothing can be compared then, and nothing has to be."""
    module, plain = look_alikes.Swapped().to(device), look_alikes.Swapped().to(device)
    with torch.no_grad():
        module.down_proj.weight.fill_(fill)
    fused_mlp.fuse_mlps(module)
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 32, device=device)
    torch.testing.assert_close(module(x), plain(x))


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_weights_that_are_elsewhere(fused_mlp, device, kind):
    """As where every process holds a part of them, and they are gathered when they are needed."""
    module, plain = kind().to(device), kind().to(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
    assert fused_mlp.fuse_mlps(module).fused
    for parameter, full in zip(module.parameters(), plain.parameters(), strict=True):
        parameter.data = full.data
    x = torch.randn(2, 32, device=device)
    torch.testing.assert_close(module(x), plain(x))


def test_on_the_meta_device(fused_mlp, device):
    """A model that has no weights yet is fused, and right when it has them."""
    with torch.device("meta"):
        model = nn.Sequential(Gated(), Plain(), look_alikes.Swapped())
    assert len(fused_mlp.fuse_mlps(model).fused) == 3
    assert model(torch.empty(3, 32, device="meta")).shape == (3, 32)
    plain = nn.Sequential(Gated(), Plain(), look_alikes.Swapped()).to(device)
    model.to_empty(device=device).load_state_dict(plain.state_dict())
    x = torch.randn(3, 32, device=device)
    torch.testing.assert_close(model(x), plain(x))


# Modules that change after they were fused.


@pytest.mark.parametrize(
    ("kind", "wrapper", "index"),
    [(kind, name, index) for kind in PROJECTIONS for name in WRAPPERS for index in range(len(PROJECTIONS[kind]))],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_projection_that_is_more_than_its_weight_is_called(fused_mlp, device, kind, wrapper, index, when):
    module = kind(bias=True).to(device)
    name = PROJECTIONS[kind][index]

    def wrap(module):
        torch.manual_seed(0)
        setattr(module, name, WRAPPERS[wrapper](getattr(module, name)).to(device))
        return module

    plain = wrap(copy.deepcopy(module))
    if when == "before":
        module = wrap(module)
        report = fused_mlp.fuse_mlps(module)
    else:
        report = fused_mlp.fuse_mlps(module)
        module = wrap(module)
    x = torch.randn(3, 32, device=device)
    with torch.no_grad():
        torch.testing.assert_close(module(x).as_subclass(torch.Tensor), plain(x).as_subclass(torch.Tensor))
    assert len(report.modules) == 1
    explanation = fused_mlp.explain(module)
    if report.fused:
        assert explanation.implementation == "partly fused"
        assert name in explanation.reason
        assert when == "after" or report.fused[0].reason == explanation.reason
    else:
        assert report.left[0].reason


def test_hooks_added_later_fire(fused_mlp, device):
    module = Gated().to(device)
    fused_mlp.fuse_mlps(module)
    module(torch.randn(2, 32, device=device))
    fired = []
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: fired.append(name))
    module(torch.randn(2, 32, device=device))
    assert sorted(fired) == ["", "act_fn", "down_proj", "gate_proj", "up_proj"]


def test_an_activation_that_is_replaced_later(fused_mlp, device):
    module = Gated(nn.SiLU).to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(2, 32, device=device)
    for act in (TanhGelu(), nn.Mish(), nn.ReLU()):
        module.act_fn = act
        torch.testing.assert_close(module(x), Gated.forward(module, x))


def test_by_keyword_and_with_too_many_arguments(fused_mlp, device):
    module = Gated().to(device)
    fused_mlp.fuse_mlps(module)
    x = torch.randn(2, 32, device=device)
    torch.testing.assert_close(module(x=x), module(x))
    with pytest.raises(TypeError):
        module(x, x)
    with pytest.raises(TypeError):
        module(y=x)


class WithDropout(Gated):
    def __init__(self, p):
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def test_dropout_is_kept_in_training(fused_mlp, device):
    module = WithDropout(0.5).to(device)
    plain = copy.deepcopy(module)
    assert fused_mlp.fuse_mlps(module).fused
    x = torch.randn(2, 32, device=device)
    results = []
    for candidate in (module, plain):
        torch.manual_seed(0)
        results.append(candidate.train()(x))
    torch.testing.assert_close(*results)
    assert not torch.allclose(module(x), module(x))
    explanation = fused_mlp.explain(module)
    assert explanation.implementation == "partly fused"
    assert "dropout (active in training)" in explanation.reason
    torch.testing.assert_close(module.eval()(x), plain.eval()(x))
    assert fused_mlp.explain(module).implementation == "fused"


def test_dropout_of_zero_costs_nothing(fused_mlp, device):
    module = WithDropout(0.0).to(device).train()
    fused_mlp.fuse_mlps(module)
    assert fused_mlp.explain(module).implementation == "fused"


def test_functions_as_activations(fused_mlp, device):
    """act_fn = F.silu, as some models have it."""
    for function in (F.silu, F.gelu, torch.relu, F.relu, torch.sigmoid):
        module = Gated(lambda function=function: function).to(device)
        x = torch.randn(2, 32, device=device)
        expected = module(x)
        assert fused_mlp.fuse_mlps(module).fused
        torch.testing.assert_close(module(x), expected)


def test_after_kernelize(fused_mlp, device):
    """A forward that kernelize put there is somebody's own."""
    module = Gated().to(device)
    module.forward = fused_mlp.layers.GatedMLP.forward.__get__(module)
    assert fused_mlp.fuse_mlps(module).fused == []
    assert fused_mlp.explain(module).implementation == "fused"


def test_sharing_of_parameters_survives(fused_mlp, device):
    """Verification copies no parameter into the model."""
    module = Gated().to(device)
    before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    identities = {name: id(parameter) for name, parameter in module.named_parameters()}
    fused_mlp.fuse_mlps(module)
    assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == before
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == identities


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_however_they_run(fused_mlp, device, experts):
    """What runs them one by one stands in a decorator of transformers, which else takes the experts' own method."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=100, num_local_experts=4)
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).to(device).eval()
    model.config._experts_implementation = experts
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    assert [module.pattern for module in report.fused] == ["pointwise"]
    ids = torch.arange(18, device=device).view(2, 9)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = fused(ids).logits
    assert any("fused_mlp" in event.name and "act_and_mul" in event.name for event in profile.events())
    with torch.no_grad():
        torch.testing.assert_close(got, model(ids).logits, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(fused)(ids).logits, got, rtol=1e-3, atol=1e-5)
    report.restore()
    assert "forward" not in vars(fused.model.layers[0].mlp.experts)
