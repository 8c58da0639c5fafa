"""MLPs found in source code: patterns for given sources."""

import ast
import importlib
import textwrap

import pytest

# Roles of the attributes of `self`, and of functions.
ROLES = {
    **dict.fromkeys(("self.p", "self.q", "self.d"), "projection"),
    **dict.fromkeys(("self.act", "gelu"), "activation"),
    **dict.fromkeys(("self.tanh", "tanh"), "unknown activation"),
    "relu": "activation",
    "sigmoid": "sigmoid",
    "self.drop": "passing",
    "dropout": "dropout",
    "self.norm": "layer",
    "self.rms": "norm",
    "self.scale": "scale",
    "self.mlp": "whole",
    "self.first": "first module",
    "self.second": "second module",
    **dict.fromkeys(("self.view", "other"), "other"),
    "isinstance": "asking",
}

# Expressions in `return ...`, and the patterns fused in them.
EXPRESSIONS = {
    "self.act(self.p(x))": ["linear"],
    "self.d(self.act(self.p(x)))": ["plain"],
    "self.d(self.drop(self.act(self.p(x))))": ["plain"],
    "self.d(dropout(self.act(self.p(x)), 0.1, self.training))": ["plain"],
    "self.d(dropout(self.act(self.p(x)), p=other(), training=self.training))": ["linear"],
    "self.d(dropout(self.act(self.p(x))))": ["linear"],
    "self.d(self.norm(self.act(self.p(x))))": ["linear"],
    "self.d(self.act(self.p(self.norm(x))))": ["plain"],
    "self.d(self.act(self.p(x)) * self.q(x))": ["gated"],
    "self.d(self.q(x) * self.act(self.p(x)))": ["gated"],
    "self.d(self.act(self.p(x)) * self.q(y))": ["pointwise"],
    "self.d(self.act(self.p(x)) + self.q(x))": ["linear"],
    "self.act(self.p(x)) * self.q(x)": ["gated linear"],
    "self.act(self.p(self.norm(x))) * self.q(self.norm(x))": ["linear"],
    "self.act(x) * y": ["pointwise"],
    "self.act(x) * self.q(x).clamp(max=7.0)": ["pointwise"],
    "self.act(x) * self.norm(y)": [],
    "self.act(self.norm(x)) * self.norm(y)": ["pointwise"],
    "self.norm(y) * self.act(x)": ["pointwise"],
    "self.act(x) * x.mul_(2)": [],
    "self.act(x) * self.view(y)": [],
    "self.act(x) * (y := x)": [],
    "self.act(self.p(x := x + 1))": [],
    "self.act(self.p(*x))": [],
    "self.act(self.p(x, y))": [],
    "self.act(*self.p(x))": [],
    "self.act(input=self.p(x))": [],
    "self.d(self.p(x))": [],
    "[self.act(self.p(x)) for x in y]": [],
    "lambda: self.act(self.p(x))": [],
    "y if x is None else self.d(self.act(self.p(x)))": ["plain"],
    # Activations written out.
    "gelu(self.p(x), approximate='tanh')": ["linear"],
    "gelu(self.p(x), approximate=self.approximate)": ["linear"],
    "gelu(self.p(x), approximate=other())": [],
    "relu(self.p(x), inplace=True)": ["linear"],
    "relu(self.p(x), True)": ["linear"],
    "self.d(self.p(x).relu())": [],
    "self.d(self.act(self.p(x)) ** 2)": ["linear"],
    "self.d(self.p(x) * sigmoid(self.p(x)))": ["gated"],  # the source calls it twice too
    "self.d(glu(self.p(x)))": [],
}

# Methods, with `h` as the activation's input.
BODIES = {
    "h = self.p(x); return self.d(self.act(h))": ["plain"],
    "h: Tensor = self.p(x); return self.d(self.act(h))": ["plain"],
    "h = self.p(x); h = self.act(h); h = self.drop(h); return self.d(h)": ["plain"],
    "h = self.p(x); n = x.shape[0]; return self.d(self.act(h)), n": ["plain"],
    "h = self.p(x); g = self.act(h); u = self.q(x); return self.d(g * u)": ["gated"],
    "u = self.q(x); g = self.act(self.p(x)); return self.d(g * u)": ["gated"],
    "g, u = self.p(x).chunk(2, dim=-1); return self.d(self.act(g) * u)": ["packed gated"],
    "u, g = self.p(x).chunk(2, -1); return self.d(self.act(g) * u)": ["packed gated, up first"],
    "h = torch.chunk(self.p(x), 2, dim=-1); return self.act(h[0]) * h[1]": ["packed gated linear"],
    "g, u = self.p(x).chunk(2, dim=1); return self.act(g) * u": ["pointwise"],
    "g, u = self.p(x).chunk(3, dim=-1); return self.act(g) * u": ["pointwise"],
    "g, u, v = self.p(x).chunk(2, dim=-1); return self.act(g) * u": ["pointwise"],
    "g, *u = self.p(x).chunk(2, dim=-1); return self.act(g) * u": ["pointwise"],
    "h = self.p(x); return self.d(h * sigmoid(h))": ["pointwise"],
    "h = self.p(x); g = self.q(x); return self.d(h * sigmoid(g))": ["gated"],
    # Conditional casts.
    "h = self.act(self.p(x)); if h.dtype != x.dtype: h = h.to(self.d.weight.dtype); return self.d(h)": ["plain"],
    "h = self.act(self.p(x)); if isinstance(h, Tensor): h = h.to(self.d.weight.dtype); return self.d(h)": ["plain"],
    "h = self.act(self.p(x)); h = h * self.q(x); if y: h = h.to(self.d.weight.dtype); return self.d(h)": ["gated"],
    "h = self.act(self.p(x)); if y: h = h.to(self.d.weight.dtype); h = self.drop(h); return self.d(h)": ["plain"],
    "h = self.act(self.p(x)); if y: h = h.to(self.d.weight.dtype); return self.d(h), h": ["linear"],
    "h = self.act(self.p(x)); if y: h = h.to(self.q.weight.dtype); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); if y: h = h.to(self.d.bias.dtype); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); if y: h = h.to(x.dtype); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); if y: h = x.to(self.d.weight.dtype); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); if y: h = h.to(self.d.weight.dtype, copy=True); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); if other(h): h = h.to(self.d.weight.dtype); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); if (z := y): h = h.to(self.d.weight.dtype); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); if y: h = h.to(self.d.weight.dtype)\nelse: h = x\nreturn self.d(h)": ["linear"],
    "h = self.act(self.p(x)); n = 1; if y: h = h.to(self.d.weight.dtype); return self.d(h)": ["linear"],
    "h = self.act(self.p(x)); return self.d(h.to(self.d.weight.dtype) if y else h)": ["plain"],
    "h = self.act(self.p(x)); return self.d(h.to(self.d.weight.dtype) if other(h) else h)": ["linear"],
    "h = self.act(self.p(x)); h = h.to(self.d.weight.dtype) if (z := y) else h; return self.d(h)": ["linear"],
    # Used a second time, or under a condition.
    "h = self.p(x); return self.d(self.act(h)), h": [],
    "h = self.p(x); return lambda: self.act(h)": [],
    "h = self.p(x); return [h for _ in x], self.act(h)": [],
    "h = self.p(x); y = self.act(h); h += 1; return y": [],
    "h = self.p(x); y = self.act(h); del h; return y": [],
    "h = self.p(x); return self.act(h) if self.training else x": [],
    "h = self.p(x); return self.training and self.act(h)": [],
    "h = self.p(x); return 0 < x < self.act(h)": [],
    "for z in y:\n    h = self.p(x)\n    y = self.act(h)\n    h = 0\nreturn h": ["linear"],
    "for z in y:\n    h = self.p(x)\n    y = self.act(h)\n    if z: break\n    h = 0\nreturn h": [],
    "for z in y:\n    h = self.p(x)\n    y = self.act(h)\n    if z: continue\n    h = 0\nreturn h": [],
    "with y:\n    h = self.p(x)\n    y = self.act(h)\n    h = other()\nreturn h": [],
    "with y:\n    h = self.p(x)\n    g = self.act(h)\n    return self.d(g)": ["plain"],
    "with y:\n    u = self.q(x)\n    g = self.act(self.p(x))\n    u = u * g\n    return self.d(u)": ["gated"],
    "with y:\n    u = self.q(x)\n    g = self.act(self.p(x))\n    u = u * g\n    u = self.d(u)\nreturn u": [
        "pointwise"
    ],
    "with y:\n    u = self.q(x)\n    g = self.act(self.p(x))\n    v = u * g\n    return self.d(v)": ["gated"],
    "if y:\n    h = self.p(x)\n    z = self.act(h)\nelse:\n    h = 0\n    z = h\nreturn z": ["linear"],
    "h = y; other(h); if y:\n    h = self.p(x)\n    z = self.act(h)\nreturn z": ["linear"],
    "if y:\n    h = self.p(x)\n    z = self.act(h)\nelse:\n    h = z = 0\nreturn h": [],
    "for z in y:\n    if z:\n        h = self.p(x)\n        z = self.act(h)\n    else:\n        z = h\nreturn z": [],
    "for z in y:\n    h = self.p(x)\n    z = self.act(h)\nelse:\n    z = h\nreturn z": [],
    # Something happens in between.
    "h = self.p(x); other(); return self.act(h)": [],
    "h = self.p(x); y = self.q(x); return self.act(h), y": [],
    "h = self.p(x); return self.q(x) + self.act(h)": [],
    "h = self.p(x); self.last = x; return self.act(h)": [],
    "h = self.p(x); x.add_(1); return self.act(h)": [],
    "h = self.p(x); x += 1; return self.act(h)": [],
    "h = self.p(x); x[0] = 1; return self.act(h)": [],
    "h = self.p(x); assert self.ready; return self.act(h)": [],
    "h = self.act(self.p(x)); x = 1; return self.d(h)": ["linear"],
    "self.last = self.d(self.act(self.p(x)))": ["plain"],
    "h = self.p(x); self.last = self.act(h)": ["linear"],
    "x += self.d(self.act(self.p(x)))": ["plain"],
}

# Ways to rebind `h` between the projection and the activation; test_rewriting.py runs the others.
REBOUND = [
    *("del h", "import h", "import h.y", "import y as h", "from y import h", "from y import z as h"),
    *("def h(): pass", "async def h(): pass", "class h: pass", "for y, (h, z) in x: pass", "with x as (y, h): pass"),
    *("try:\n    pass\nexcept ValueError as h:\n    pass", "match x:\n    case [_, *h]: pass"),
    *("match x:\n    case {'y': 1, **h}: pass", "match x:\n    case 1: h = 1"),
    "y = lambda: (h := x)",  # does not rebind it, but that need not be known
]


# Methods that call halves of MLPs, and whether these become one call.
SPLIT_MLPS = {
    "return self.second(self.first(x), x)": True,
    "return self.second(self.first(self.norm(x)))": True,
    "h = self.first(x); return self.second(h, x, 1, scale=y)": True,
    "h = self.first(x); n = x.shape[0]; h = self.second(h, x); return h, n": True,
    "x = self.norm(x); x = self.first(x); x = self.second(x, y); return x": True,
    "return y + self.second(self.first(x))": True,
    "h = self.first(x); return self.second(h, x), h": False,
    "h = self.first(x); x = y; return self.second(h, x)": False,
    "h = self.first(x); other(); return self.second(h, x)": False,
    "h = self.first(x); return self.second(h, x) if y else x": False,
    "return self.second(self.first(x), self.norm(x))": False,
    "return self.second(self.first(x), self.residual)": False,  # a hook of the first half may set it
    "return self.second(self.first(x), *y)": False,
    "return self.second(self.first(x), **y)": False,
    "return self.second(x, self.first(x))": False,
    "return self.second(self.first(x, y))": False,
    "return self.second(self.first(x)[0])": False,
    "return self.second(self.norm(self.first(x)))": False,
    "return self.first(self.second(x))": False,
}

# The returned value, and the block found in it: the parts around the MLP, in words of `around`.
BLOCKS = {
    "x + self.mlp(x)": "sum",
    "self.mlp(x) + x": "sum",
    "x + self.drop(self.mlp(self.rms(x)))": "first self.drop sum",
    "self.rms(x + self.mlp(x))": "sum last",
    "self.rms(x + self.mlp(self.rms(x)))": "first sum last",
    "x + self.rms(self.mlp(self.rms(x)))": "first self.rms sum",
    "x + self.drop(self.rms(self.drop(self.mlp(x))))": "self.drop self.rms self.drop sum",
    "x + dropout(self.scale(self.mlp(x)), 0.1, self.training)": "self.scale 0.1 if self.training else 0.0 sum",
    "x + self.d(self.act(self.p(self.rms(x))))": "first sum",
    "x + self.rms(self.d(self.act(self.p(x)))) * self.factor": "self.rms * self.factor sum",
    "x + self.mlp(x) * self.config.factor": "* self.config.factor sum",
    "x + self.mlp(x) * 0.5": "* 0.5 sum",
    "0.5 * self.mlp(x) + x": "* 0.5 sum",
    "self.rms(x + 0.5 * self.mlp(x))": "* 0.5 sum last",
    "self.rms(x + self.scale(self.mlp(x)))": "self.scale sum",
    "self.rms(x + self.rms(self.mlp(x)))": "self.rms sum",
    "x + self.rms(self.rms(self.mlp(x)))": "",
    "x + self.scale(self.rms(self.mlp(x)))": "",
    "x + self.factor * self.mlp(x)": "* self.factor sum",  # its own __mul__ may differ
    "x + self.drop(self.factor * self.drop(self.mlp(x)))": "self.drop self.drop * self.factor sum",
    "x + self.drop(self.rms(self.factor * self.mlp(x)))": "",
    "x + y + self.mlp(x)": "sum",
    "x + (y + x) + self.mlp(x)": "sum",
    "self.mlp(x) + (x + y)": "sum",
    "x * y + self.mlp(x)": "",
    "x + 1 + self.mlp(x)": "",
    "x + self.mlp(x) * y": "* y sum",
    "x + y[:, None] * self.mlp(x)": "* y[:, None] sum",
    "x + self.drop(self.mlp(x)) * y.unsqueeze(1)": "self.drop * y.unsqueeze(1) sum",
    "x + self.mlp(x) * y[0]": "",
    "x + self.mlp(x) * y.unsqueeze(x)": "",
    "x + self.mlp(self.rms(x) * (1 + y) + x)": "first (1 + y) + x sum",
    "x + self.mlp((y[:, None] + 1) * self.rms(x) + y.unsqueeze(-1))": "first (1 + y[:, None]) + y.unsqueeze(-1) sum",
    "x + self.mlp(self.rms(x) * (1 + y))": "first (1 + y) sum",
    "x + self.mlp(y + self.rms(x) * (1 + y))": "sum",
    "x + self.mlp(self.rms(x) * (2 + y) + y)": "sum",
    "x + self.mlp(self.rms(x) * (1.0 + y) + y)": "sum",
    "x + self.mlp(self.rms(x) * y + y)": "sum",
    "x + self.mlp(self.rms(x) * (1 + other()) + y)": "sum",
    "x + self.mlp(self.rms(x) * (1 + y) + y[0])": "sum",
    "x + self.mlp(self.rms(x) * (1 + self.y) + y)": "sum",
    "(x.float() + self.mlp(x).float() * y).type_as(x)": "* y wide sum",
    "(y * self.drop(self.mlp(x)).float() + x.float()).type_as(x)": "self.drop * y wide sum",
    "(x.float() + self.mlp((self.rms(x.float()) * (1 + y) + y).type_as(x)).float() * y).type_as(x)": (
        "first wide (1 + y) + y * y wide sum"
    ),
    "(x.float() + self.mlp(x).float() * y).type_as(y)": "",
    "(x + self.mlp(x).float() * y).type_as(x)": "",
    "(x.float() + self.mlp(x) * y).type_as(x)": "",
    "(x.float() + self.mlp(x).float()).type_as(x)": "",
    "(x.float() + self.mlp(x).float() * y).to(x)": "",
    "self.rms((x.float() + self.mlp(x).float() * y).type_as(x))": "* y wide sum",
    "x + self.mlp((self.rms(x.float()) * (1 + y) + y).type_as(y))": "sum",
    "x + self.mlp((self.rms(x) * (1 + y) + y).type_as(x))": "sum",
    "x + self.mlp(self.rms(x.float()) * (1 + y) + y)": "first (1 + y) + y sum",
    "x + self.mlp(self.rms(x.float()).type_as(x))": "sum",
    "x + self.mlp(x) * other()": "",
    "x + self.drop(self.mlp(x) * 0.5)": "self.drop * 0.5 sum",
    "x + self.mlp(x) / 2": "",
    "x - self.mlp(x)": "",
    "x[0] + self.mlp(x)": "",
}

# The start of a module, with `h` as its argument, and whether this is the last projection of an MLP.
STARTS = {
    "return self.d(h)": True,
    "return self.norm(self.d(h) + y)": True,
    "h = self.d(h); return self.norm(h + y)": True,
    "'A docstring.'; h = self.drop(self.d(self.drop(h))); return h + y": True,
    "z = self.d(h); return z + h": False,
    "return self.d(h) + self.d(h)": False,
    "y = y + 1; return self.d(h)": False,
    "return self.norm(y) + self.d(h)": False,
    "return self.d(h) if y else h": False,
    "return self.d(self.norm(h))": False,
    "return self.d(y)": False,
    "z = self.d(h); return lambda: h": False,
}


def found(fused_mlp, body):
    """Returns the matches in a method with this body, and the method with `fused` in their places."""
    substitution = importlib.import_module(f"{fused_mlp.__name__}.models.rewriting.substitution")
    tree = ast.parse("def forward(self, x, y=None):\n" + textwrap.indent(body, "    ")).body[0]
    made = substitution.rewrite(
        tree, lambda node: ROLES.get(ast.unparse(node)), lambda match: True, lambda match: ast.Name("fused", ast.Load())
    )
    return made, tree


def patterns(fused_mlp, body):
    return sorted(str(match.pattern) for match in found(fused_mlp, body)[0])


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions(fused_mlp, expression):
    assert patterns(fused_mlp, f"return {expression}") == EXPRESSIONS[expression]


@pytest.mark.parametrize("body", BODIES)
def test_bodies(fused_mlp, body):
    assert patterns(fused_mlp, body.replace("; ", "\n")) == BODIES[body]


@pytest.mark.parametrize("body", SPLIT_MLPS)
def test_split_mlps(fused_mlp, body):
    matches, _ = found(fused_mlp, body.replace("; ", "\n"))
    assert [type(match).__name__ for match in matches] == ["SplitMLP"] * SPLIT_MLPS[body]


def around(block):
    behind = [ast.unparse(part) for part in block.behind]
    if block.factor:
        behind.append(f"* {ast.unparse(block.factor)}")
    first = ["first"] * bool(block.first)
    if block.modulation:
        first += ["wide"] * block.modulation.wide
        first.append(f"(1 + {ast.unparse(block.modulation.scale)})")
        first += [f"+ {ast.unparse(block.modulation.shift)}"] if block.modulation.shift else []
    return " ".join(first + behind + ["wide"] * block.wide + ["sum"] + ["last"] * bool(block.last))


@pytest.mark.parametrize("expression", BLOCKS)
def test_blocks(fused_mlp, expression):
    matches, _ = found(fused_mlp, f"return {expression}")
    assert "".join(around(match) for match in matches if type(match).__name__ == "Block") == BLOCKS[expression]


@pytest.mark.parametrize("body", STARTS)
def test_starts(fused_mlp, body):
    matches = importlib.import_module(f"{fused_mlp.__name__}.models.matching.search")
    tree = ast.parse("def forward(self, h, y=None):\n" + textwrap.indent(body.replace("; ", "\n"), "    ")).body[0]
    start = matches.start_of(tree, lambda node: ROLES.get(ast.unparse(node)))
    assert (start is not None) == STARTS[body]
    if start is not None:
        assert (ast.unparse(start.projection), start.argument.id) == ("self.d", "h")


@pytest.mark.parametrize("statement", REBOUND)
@pytest.mark.parametrize("where", ["before", "within"])
def test_a_name_that_is_bound_anew(fused_mlp, statement, where):
    """A rebound name keeps the projection and its activation in their places."""
    body = f"h = self.p(x)\n{statement}\nreturn self.act(h)"
    if where == "within":
        body = f"for z in x:\n{textwrap.indent(body, '    ')}"
    assert patterns(fused_mlp, body) == []
    # The same for the activation's value and the projection's input.
    assert "plain" not in patterns(
        fused_mlp, body.replace("self.p(x)", "self.act(self.p(x))").replace("act(h)", "d(h)")
    )
    moved = body.replace("h = self.p(x)", "y = self.p(h)").replace("self.act(h)", "self.act(y)")
    assert patterns(fused_mlp, moved) == []


@pytest.mark.parametrize(
    ("body", "up_left"),
    [
        ("return self.act(self.p(x)) * self.q(x)", False),
        ("return self.q(x) * self.act(self.p(x))", True),
        ("g = self.p(x); u = self.q(x); return self.act(g) * u", False),
        ("g = self.p(x); u = self.q(x); return u * self.act(g)", True),
        ("g = self.p(x); g = self.act(g); u = self.q(x); return u * g", True),
        ("u = self.q(x); g = self.p(x); return self.act(g) * u", False),
        ("g = self.p(x); return self.q(x) * self.act(g)", True),
    ],
)
def test_the_gate_is_the_factor_with_the_activation(fused_mlp, body, up_left):
    ((match,), _) = found(fused_mlp, body.replace("; ", "\n"))
    assert [ast.unparse(part) for part in match.projections] == ["self.p", "self.q"]
    assert match.pattern.up_left == up_left


def test_what_is_left_of_a_method(fused_mlp):
    """The remaining method has all statements but those that the call contains, in order."""
    _, tree = found(fused_mlp, "n = len(x)\nh = self.p(x)\nk = n + 1\nh = self.act(h)\nreturn self.d(h) + k")
    assert ast.unparse(tree).splitlines()[1:] == ["    n = len(x)", "    k = n + 1", "    return fused + k"]
