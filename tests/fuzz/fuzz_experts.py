"""Writes random classes of experts, the same for equal seeds, and later changes to them.

Most compute the same as ``experts_mlp``; some add a capacity, a threshold, a literal or another condition, which a run
on a few tokens need not trigger. Fused ones must compute the same as the original, also after the change, and so must
those with PEFT adapters around their weights, in any state of these.
"""

import copy
import importlib.util
import random

import peft
import torch
from torch import nn

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 8, 6, 80

SOURCE = """\
import torch
import torch.nn.functional as F
from torch import nn

SLOPE, OFFSET = {slope}, 1.0


class Config:
    factor, threshold = 1.0, 0.1


def swish(x):
    return x * torch.sigmoid(SLOPE * x)


class Experts(nn.Module):
    share = 1.0

    def __init__(self):
        super().__init__()
        self.config, self.limit, self.capacity, self.num_experts = Config(), {limit}, 5, {experts}
        self.act, self.seen = nn.{act}(), torch.zeros({experts})
        self.up = nn.Parameter(torch.randn({up}) * 0.6)
        self.down = nn.Parameter(torch.randn({down}) * 0.6)

    def between(self, h):
        gate, up = {halves}
{bounds}        return {product}

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
{before}{loop}
            current = x[token]
            hidden = {first}
            hidden = {second}
            out.index_add_(0, token, {added})
        return {result}
"""

RANGE = """\
        for expert in range(self.num_experts):
            position, token = torch.where({mask}.T)
{inside}"""
HIT = """\
        with torch.no_grad():
            mask = F.one_hot(index, num_classes=self.num_experts + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            if expert == self.num_experts:
                continue
            position, token = torch.where(mask[expert])
{inside}"""

ACTS = ["self.act(gate)", "swish(gate)", "F.silu(gate)", "gate * torch.sigmoid(gate)", "F.gelu(gate)", "F.mish(gate)"]
BOUNDS = ["", "", "", "", "", "        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)\n"]
BOUNDS += ["        gate = gate.clamp(max=4.0)\n", "        up = up.clamp(-self.limit, self.limit)\n"]
BEFORE = [*[""] * 12, "        if x.shape[0] > 64:\n            return x\n", "        self.seen[index] += 1\n"]
BEFORE += ["        if index.numel() == 0:\n            return out\n", "        x = x * self.config.factor\n"]
INSIDE = [*[""] * 8, "            if token.numel() == 0:\n                continue\n"]
INSIDE += ["            position, token = position[: self.capacity], token[: self.capacity]\n"]
INSIDE += [
    "            if token.numel() < 4:\n                continue\n",
    "            if expert == 3:\n                continue\n",
]
MASKS = ["(index == expert)"] * 6 + ["((index == expert) & (weights > self.config.threshold))"]
ADDED = ["hidden * weights[token, position, None]"] * 8
ADDED += ["hidden * weights[token, position].unsqueeze(-1) * self.config.factor", "hidden", "2.0 * " + ADDED[0]]
RESULTS = [*["out"] * 6, "out.to(x.dtype)", "out * self.share", "out * self.config.factor", "out + x"]

CHANGES = [
    "module.config.factor = 2.5",
    "module.limit = 0.5",
    "module.num_experts = 3",
    "type(module).share = 3.0",
    "home.SLOPE = 0.5",
    "home.swish = torch.tanh",
    "module.act = torch.nn.Tanh()",
    "module.act.register_forward_hook(lambda module, given, out: out * 2)",
    "type(module).between = lambda self, h: h.chunk(2, dim=-1)[0]",
    "home.swish.__code__ = (lambda x: x * 2).__code__",
]


def source_of(seed):
    """Returns the source of a class, and a change for a module of it."""
    draw = random.Random(seed)
    transposed, up, down = draw.random() < 0.4, (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)
    inside = draw.choice(INSIDE)
    loop = draw.choice([RANGE.replace("{mask}", draw.choice(MASKS)), HIT]).replace("{inside}", inside).rstrip("\n")
    product = "{x} @ self.{w}[expert]" if transposed else "F.linear({x}, self.{w}[expert])"
    text = SOURCE.format(
        slope=draw.choice([1.0, 1.702, 1.1]),
        limit=draw.choice([0.7, 4, 20.0]),
        experts=EXPERTS,
        act=draw.choice(["SiLU", "GELU", "ReLU", "Mish"]),
        up=", ".join(map(str, (EXPERTS, *(up[::-1] if transposed else up)))),
        down=", ".join(map(str, (EXPERTS, *(down[::-1] if transposed else down)))),
        halves=draw.choice(["h.chunk(2, dim=-1)"] * 5 + ["(h[..., ::2], h[..., 1::2])", "h.chunk(2, dim=-1)[::-1]"]),
        bounds=draw.choice(BOUNDS),
        product=draw.choice(ACTS) + draw.choice([*[" * up"] * 4, " * (up + OFFSET)", " * (up + 0.5)"]),
        before=draw.choice(BEFORE),
        loop=loop,
        first=product.replace("{x}", "current").replace("{w}", "up"),
        second=product.replace("{x}", "self.between(hidden)").replace("{w}", "down"),
        added=draw.choice(ADDED),
        result=draw.choice(RESULTS),
    )
    return text, draw.choice(CHANGES)


def outcome(fused_mlp, seed, folder):
    """Returns "fused" or "left". Raises AssertionError if a fused class computes something else."""
    text, change, home = _loaded(seed, folder)
    torch.manual_seed(seed)
    module = home.Experts()
    fused = copy.deepcopy(module)
    is_fused = any(entry.pattern.startswith("experts") for entry in fused_mlp.fuse_mlps(fused).fused)
    assert torch.equal(fused.seen, module.seen), text
    x = torch.randn(TOKENS, WIDTH) * 4
    weights, index = torch.rand(TOKENS, EXPERTS).topk(2, dim=-1)
    for _ in range(3):
        _assert_alike(fused, module, (x, index, weights * 0.4), text)
    for each in (module, fused):
        exec(change, {"module": each, "home": home, "torch": torch})
    for _ in range(2):
        _assert_alike(fused, module, (x, index, weights * 0.4), f"{text}\n{change}")
    return "fused" if is_fused else "left"


def _loaded(seed, folder):
    text, change = source_of(seed)
    path = folder / f"experts_{seed}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    home = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(home)
    return text, change, home


class Holder(nn.Module):
    """A model of only experts."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *given):
        return self.experts(*given)


STATES = [
    "model.merge_adapter()",
    "model.base_model.disable_adapter_layers()",
    "model.set_adapter('second')",
    "model.base_model.set_adapter(['default', 'second'])",
    "model.delete_adapter('default')",
    "model.experts.lora_A['default'].weight.data.mul_(2.0)",
    "model.experts.lora_B['default'].register_forward_hook(lambda module, given, out: out)",
    "model.double().float()",
]


def adapted_outcome(fused_mlp, seed, folder):
    """Does the same as :func:`outcome` for weights with adapters: values, and gradients of x and of the adapters."""
    text, change, home = _loaded(seed, folder)
    draw = random.Random(f"{seed} adapters")
    targets = draw.choice([["experts.up", "experts.down"]] * 2 + [["experts.up"], ["experts.down"]])
    options = {"r": draw.randint(1, 6), "lora_alpha": draw.randint(1, 8), "use_rslora": draw.random() < 0.3}
    config = peft.LoraConfig(**options, target_parameters=targets, init_lora_weights=False)
    torch.manual_seed(seed)
    model = peft.get_peft_model(Holder(home.Experts()), config)
    model.add_adapter("second", config)
    model.set_adapter("default")
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    x = torch.randn(draw.choice([1, 2, TOKENS]), WIDTH) * 2
    weights, index = torch.rand(x.shape[0], EXPERTS).topk(2, dim=-1)
    given, state = (x, index, weights * 0.4), draw.choice(STATES)
    for words in ("pass", state, "pass", change):
        for each in (model, fused):
            module = each.base_model.model.experts.get_base_layer()
            exec(words, {"model": each, "module": module, "home": home, "torch": torch})
        _assert_alike(fused, model, given, f"{text}\n{state}\n{change}\nbehind {words}")
        expected, got = _gradients(model, given), _gradients(fused, given)
        assert expected.keys() == got.keys(), text
        for name, gradient in expected.items():
            error = (got[name] - gradient).norm()
            assert error <= 1e-3 * gradient.norm() + 1e-5, f"{text}\n{state}\n{change}\nbehind {words}: {name}"
    return "fused" if any("LoRA" in entry.pattern for entry in report.fused) else "left"


def _gradients(model, given):
    model.zero_grad()
    x = given[0].clone().requires_grad_()
    try:
        result = model(x, *given[1:])
        result.square().sum().backward()
    except (RuntimeError, IndexError, TypeError) as error:
        return {type(error).__name__: torch.zeros(())}
    found = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    return found | ({} if x.grad is None else {"x": x.grad})


def _assert_alike(fused, module, given, text):
    with torch.no_grad():
        expected, got = _result(module, given), _result(fused, given)
    if isinstance(expected, type):
        assert got == expected, text
    else:
        assert (got - expected).norm() <= 1e-4 * expected.norm() + 1e-6, text


def _result(module, given):
    try:
        return module(*given)
    except (RuntimeError, IndexError, TypeError) as error:
        return type(error)
