"""Compiled code reads quantised layers at each call: it sees changes to them, in any order.

On a CPU such layers normally keep their own products; here compiled code handles them as on a GPU.
"""

import copy
import importlib
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import machine
from modules import Gated, PackedGated
from safety import assert_close
from test_quantized_layers import decode_in_products, of_bitsandbytes, of_rows, of_torchao, quantized_parts

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes does not load on this machine", exc_type=ImportError)
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

WIDTH, HIDDEN, BLOCK = 128, 256, (128, 128)
# Formats with one scale per row, with the function that converts a plain layer.
IN_ROWS = {
    "int8": of_bitsandbytes,
    "int8 of torchao": of_torchao("Int8WeightOnlyConfig"),
    "fp8 of torchao": of_torchao("Float8WeightOnlyConfig"),
    "fp8 in rows": of_rows,
}
FORMATS = ("nf4", "nested nf4", "fp4", "fp8", *IN_ROWS)
formats = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture(autouse=True)
def taken(fused_mlp, monkeypatch):
    """Compiled code handles quantised layers of any size on this device. The layers' own products, FP8's Hub kernels
    and int8's that round x, are replaced by products with the decoded weight.
    """

    def multiply_int8(x, weight, out, bias, state):
        wide = (state.CB.float() * state.SCB.view(-1, 1) / 127).to(x.dtype)
        return F.linear(x, wide, bias)

    decode_in_products(monkeypatch)
    monkeypatch.setattr(bnb.autograd._functions.MatMul8bitLt, "apply", multiply_int8)
    dispatch, quantized, running = (part_of(fused_mlp, name) for name in ("dispatch", *_MODULES))
    caches = dispatch._quantized_refusal, quantized.known, quantized.known_tensor
    monkeypatch.setattr(dispatch, "QUANTIZED_DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(running, "_LEAST_ELEMENTS", 0)
    monkeypatch.setattr(running, "_LEAST_WEIGHTS", 0)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    if machine.device_type() == "cpu":
        quantized.COMPILED.clear()


_MODULES = "models.parts.quantized", "models.running.adapted"


def part_of(fused_mlp, name):
    return importlib.import_module(f"{fused_mlp.__name__}.{name}")


class Counted:
    """Wraps compiled code and counts the calls that returned a tensor."""

    def __init__(self, functions):
        self.functions, self.count = functions, 0

    def __getattr__(self, name):
        function = getattr(self.functions, name)

        def call(*given):
            found = function(*given)
            self.count += isinstance(found, torch.Tensor)
            return found

        return call


@pytest.fixture
def compiled(fused_mlp, monkeypatch):
    """Returns the number of results from compiled code since the last query."""
    counted = Counted(part_of(fused_mlp, "models.running.shortcut").plain)
    monkeypatch.setattr(part_of(fused_mlp, "models.running.shortcut"), "plain", counted)
    monkeypatch.setattr(part_of(fused_mlp, "models.running.blocks"), "_plain", counted)

    def taken_since():
        counted.count, count = 0, counted.count
        return count

    return taken_since


def dtype_on(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def quantised(layer, format, device):
    dtype, out, width, biased = dtype_on(device), *layer.weight.shape, layer.bias is not None
    if format == "fp8":
        made = fp8.FP8Linear(width, out, BLOCK, has_bias=biased)
        made.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        grid = -(-out // BLOCK[0]), -(-width // BLOCK[1])
        made.weight_scale_inv = nn.Parameter(torch.rand(grid) + 0.5, requires_grad=False)
        if biased:
            made.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        return made.to(device)
    if format in IN_ROWS:
        return IN_ROWS[format](layer.to(device, dtype)).requires_grad_(False)
    options = {"compute_dtype": dtype, "compress_statistics": "nested" in format, "quant_type": format.split()[-1]}
    made = bnb.nn.Linear4bit(width, out, biased, **options)
    made.load_state_dict(layer.state_dict())
    made = made.to(device).requires_grad_(False)
    made.support_avx512bf16_for_cpu = False  # bitsandbytes' own product would repack the weight
    if biased:
        made.bias.data = made.bias.data.to(dtype)
    return made


def decoded(fused_mlp, layer):
    """The weight that a layer holds now, whatever its class."""
    if isinstance(layer, bnb.nn.Linear4bit):
        return fused_mlp.QuantizedWeight.from_bitsandbytes(layer.weight).dequantize(layer.compute_dtype)
    if isinstance(layer, fp8.FP8Linear):
        scales = layer.weight_scale_inv.float()
        of_fp8 = fused_mlp.QuantizedWeight.from_fp8
        dtype = layer.bias.dtype if layer.bias is not None else dtype_on(layer.weight.device)
        return of_fp8(layer.weight, scales, tuple(layer.block_size)).dequantize(dtype)
    if is_in_rows(layer):
        data, scales = quantized_parts(layer)
        divisor = 127 if hasattr(layer, "state") else 1
        return (data.float() * scales.view(-1, 1) / divisor).to(dtype_on(data.device))
    return layer.weight


def is_in_rows(layer):
    return any(
        hasattr(each, name) for each, name in ((layer, "state"), (layer, "weight_scale"), (layer.weight, "qdata"))
    )


def product(fused_mlp, layer, x):
    """The expected result of a layer in its current state, including hooks."""
    result = F.linear(x, decoded(fused_mlp, layer), layer.bias)
    for hook in layer._forward_hooks.values():
        result = hook(layer, (x,), result)
    return result


def expected(fused_mlp, mlp, x):
    if isinstance(mlp, PackedGated):
        gate, up = product(fused_mlp, mlp.gate_up_proj, x).chunk(2, dim=-1)
    else:
        gate, up = product(fused_mlp, mlp.gate_proj, x), product(fused_mlp, mlp.up_proj, x)
    return product(fused_mlp, mlp.down_proj, F.silu(gate) * up)


class Block(nn.Module):
    """An attention projection, followed by a norm and an MLP with a residual."""

    def __init__(self, mlp, bias):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = mlp(bias=bias, sizes=(WIDTH, HIDDEN, WIDTH))

    def forward(self, x):
        x = self.q_proj(x)
        return x + self.mlp(self.norm(x))


def block(fused_mlp, device, format, mlp=Gated, bias=True):
    made = Block(mlp, bias).to(device, dtype_on(device))
    for path, layer in list(made.named_modules()):
        if type(layer) is nn.Linear:
            made.set_submodule(path, quantised(layer.float().cpu(), format, device))
    made = made.eval().requires_grad_(False)
    fused = copy.deepcopy(made)
    assert not fused_mlp.fuse_mlps(fused, verify=False).left
    return fused


def assert_right(fused_mlp, fused, x):
    after = product(fused_mlp, fused.q_proj, x)
    wanted = after + expected(fused_mlp, fused.mlp, fused.norm(after))
    rounds = any(hasattr(layer, "weight_scale") for layer in fused.modules())  # the layer's own call rounds x
    assert_close([fused(x)], [wanted], 6e-2 if x.is_cuda or rounds else 1e-4)


def input_on(device, rows=3):
    return torch.randn(rows, WIDTH, device=device, dtype=dtype_on(device))


@formats
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("mlp", [Gated, PackedGated])
@torch.no_grad()
def test_values(fused_mlp, device, compiled, format, mlp, bias):
    """Compiled code computes the projection in one call and the MLP's block in another."""
    fused = block(fused_mlp, device, format, mlp, bias)
    fused(input_on(device))  # Python inspects each class once
    for rows in (1, 3, 16):
        compiled()
        assert_right(fused_mlp, fused, input_on(device, rows))
        assert compiled() == 2


@formats
def test_autograd_and_autocast(fused_mlp, device, compiled, format):
    """Calls under autograd are left to the layers; afterwards compiled code runs again."""
    fused = block(fused_mlp, device, format)
    with torch.no_grad():
        fused(input_on(device))
    compiled()
    if format not in ("fp8", "fp8 in rows"):  # their backward is a kernel from the Hub, or missing
        fused(input_on(device).requires_grad_(True)).sum().backward()
        assert compiled() == 0
    with torch.no_grad():
        assert_right(fused_mlp, fused, input_on(device))
    assert compiled() == 2


# Changes: functions of a layer, another layer of the same format, and the device.


def new_weight(layer, other):
    layer.weight = other.weight
    for name in ("state", "weight_scale"):
        if hasattr(other, name):
            setattr(layer, name, getattr(other, name))
    if isinstance(layer, fp8.FP8Linear):
        layer.weight_scale_inv = other.weight_scale_inv


def holder_of(layer):
    """The object that holds the values and row scales of a layer, and the two attribute names."""
    if hasattr(layer, "weight_scale"):
        return layer, "weight", "weight_scale"
    if hasattr(layer, "state"):
        return layer.state if layer.weight.CB is None else layer.weight, "CB", "SCB"
    return layer.weight, "qdata", "scale"


def of_parts(layer, data, scales):
    """Replaces the values and scales of such a layer."""
    for name, tensor in zip(holder_of(layer)[1:], (data, scales)):
        held = getattr(holder_of(layer)[0], name)
        new = nn.Parameter(tensor, requires_grad=False) if isinstance(held, nn.Parameter) else tensor
        setattr(holder_of(layer)[0], name, new)


def new_data(layer, other):
    if is_in_rows(layer):
        of_parts(layer, *quantized_parts(other))
        return
    layer.weight.data = other.weight.data
    if not isinstance(layer, fp8.FP8Linear):
        layer.weight.quant_state = other.weight.quant_state


def new_scales(layer, other):
    if is_in_rows(layer):
        data, scales = quantized_parts(layer)
        of_parts(layer, data, scales * 1.25)
    elif isinstance(layer, fp8.FP8Linear):
        layer.weight_scale_inv.data = layer.weight_scale_inv.data * 1.25
    elif not layer.weight.quant_state.nested:
        layer.weight.quant_state.absmax = layer.weight.quant_state.absmax * 1.25


def scales_in_place(layer, other):
    if is_in_rows(layer):
        quantized_parts(layer)[1].mul_(0.75)
    elif isinstance(layer, fp8.FP8Linear):
        layer.weight_scale_inv.mul_(0.75)
    elif layer.weight.quant_state.nested:
        layer.weight.quant_state.state2.absmax.mul_(0.75)
    else:
        layer.weight.quant_state.absmax.mul_(0.75)


def new_offset(layer, other):
    state = getattr(layer.weight, "quant_state", None)
    if state is not None and state.nested:
        state.offset = state.offset + 0.01


def offset_in_place(layer, other):
    state = getattr(layer.weight, "quant_state", None)
    if state is not None and state.nested:
        state.offset.add_(0.01)


def biased(layer, other):
    layer.bias = None if layer.bias is not None else other.bias


def hooked(layer, other):
    if layer._forward_hooks:
        layer._forward_hooks.clear()
    else:
        layer.register_forward_hook(lambda module, given, result: result * 1.5)


def copied(layer, other):
    layer.weight = copy.deepcopy(layer.weight)


def moved(layer, other):
    layer.to("cpu").to(other.weight.device)


CHANGES = (
    *(new_weight, new_data, new_scales, scales_in_place, new_offset, offset_in_place),
    *(biased, hooked, copied, moved),
)


@formats
@pytest.mark.parametrize("path", ["q_proj", "mlp.gate_proj", "mlp.down_proj"])
@torch.no_grad()
def test_changes_are_seen(fused_mlp, device, format, path):
    for change in CHANGES:
        fused = block(fused_mlp, device, format)
        assert_right(fused_mlp, fused, input_on(device))
        layer = fused.get_submodule(path)
        change(layer, quantised(nn.Linear(layer.in_features, layer.out_features), format, device))
        for _ in range(2):  # after Python has inspected the change, compiled code may handle the layer again
            assert_right(fused_mlp, fused, input_on(device))


@formats
@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_random_changes(fused_mlp, device, compiled, format, seed):
    """Results stay right while layers are changed and swapped for other formats or plain layers, in random order."""
    random.seed(seed)
    torch.manual_seed(seed)
    fused = block(fused_mlp, device, format)
    paths = ["q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    taken_any = 0
    for _ in range(25):
        path = random.choice(paths)
        layer = fused.get_submodule(path)
        source = nn.Linear(layer.in_features, layer.out_features)
        if random.random() < 0.25:
            other = random.choice([*FORMATS, None])
            made = source.to(device, dtype_on(device)) if other is None else quantised(source, other, device)
            fused.set_submodule(path, made.eval().requires_grad_(False))
            if path == "q_proj":
                fused_mlp.fuse_mlps(fused, verify=False)
        elif type(layer) is not nn.Linear or is_in_rows(layer):
            form = next(each for each in FORMATS if is_of(layer, each))
            random.choice(CHANGES)(layer, quantised(source, form, device))
        compiled()
        assert_right(fused_mlp, fused, input_on(device, random.choice([1, 2, 5])))
        taken_any += compiled()
    assert taken_any > 10


def is_of(layer, format):
    if isinstance(layer, fp8.FP8Linear):
        return format == "fp8"
    if is_in_rows(layer):
        data, _ = quantized_parts(layer)
        is_of_torchao = not (hasattr(layer, "state") or hasattr(layer, "weight_scale"))
        word = "int8" if data.dtype is torch.int8 else "fp8"
        return format == (f"{word} of torchao" if is_of_torchao else "int8" if word == "int8" else "fp8 in rows")
    state = getattr(layer.weight, "quant_state", None)
    return state is not None and format == ("nested " if state.nested else "") + state.quant_type


def in_another_dtype(layer):
    layer.compute_dtype = torch.float16


def lost_state(layer):
    layer.quant_state, layer.weight.quant_state = layer.weight.quant_state, None


def unset(layer):
    layer.compute_dtype, layer.compute_type_is_set = None, False


def packed_anew(layer):
    layer.weight.quant_state.packing_format_for_cpu = True


def with_a_call(layer):
    layer._compiled_call_impl = lambda x: x


def with_an_own_weight(layer):
    layer.__dict__["weight"] = layer._parameters["weight"]


def too_short(layer):
    layer.weight.quant_state.absmax = layer.weight.quant_state.absmax[:-1].clone()


def of_other_scales(layer):
    layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.double()


def elsewhere(layer):
    state = layer.weight.quant_state
    state.absmax = state.absmax.to("cpu" if state.absmax.is_cuda else "meta")


def offloaded(layer):
    held = layer.weight
    data = held.data.to("cpu" if held.is_cuda else "meta")
    layer.weight = bnb.nn.Params4bit(data, quant_state=held.quant_state, bnb_quantized=True)


def with_forward_of_its_own(layer):
    layer.forward = lambda x: x


LEFT = (
    *(in_another_dtype, lost_state, unset, packed_anew),
    *(with_a_call, with_an_own_weight, too_short, of_other_scales, elsewhere, offloaded, with_forward_of_its_own),
)


def wide(layer):
    layer.state.has_fp16_weights = True


def of_other_values(layer):
    of_parts(layer, quantized_parts(layer)[0].short(), quantized_parts(layer)[1])


def of_fewer_scales(layer):
    of_parts(layer, quantized_parts(layer)[0], quantized_parts(layer)[1].view(-1)[:-1].clone())


def of_wide_scales(layer):
    of_parts(layer, quantized_parts(layer)[0], quantized_parts(layer)[1].double())


def of_own_blocks(layer):
    layer.weight.block_size = [1, 64]


def scaled_before(layer):
    layer.weight.act_pre_scale = torch.ones(1, device=layer.weight.device)


def rounding(layer):
    layer.weight.act_quant_kwargs = object()


LEFT = (
    *(("nf4", change) for change in LEFT),
    *((format, change) for format in IN_ROWS for change in (of_fewer_scales, of_wide_scales, with_a_call)),
    *(("int8", wide), ("int8", of_other_values), ("int8 of torchao", of_other_values)),
    *(("int8 of torchao", change) for change in (of_own_blocks, scaled_before, rounding)),
)


def compiled_answer(fused_mlp, device, format):
    """A quantised layer, and a function that calls the compiled code for it."""
    fused = block(fused_mlp, device, format)
    fused(input_on(device))
    plain = part_of(fused_mlp, "models.running.shortcut").plain
    adapted, forwards = (part_of(fused_mlp, f"models.running.{name}") for name in ("adapted", "forwards"))
    layer = fused.mlp.gate_proj
    return layer, lambda: plain.adapted(forwards.LINEAR, layer, input_on(device), adapted._IDENTITY.function)


@pytest.mark.parametrize(("format", "change"), LEFT, ids=lambda each: getattr(each, "__name__", each))
@torch.no_grad()
def test_left_to_python(fused_mlp, device, format, change):
    """Compiled code declines a layer in this state."""
    layer, answer = compiled_answer(fused_mlp, device, format)
    assert answer() is not None
    change(layer)
    assert not isinstance(answer(), torch.Tensor)


@pytest.mark.parametrize(("format", "name"), [("nf4", "matmul_4bit"), ("int8", "matmul"), ("int8 of torchao", None)])
@torch.no_grad()
def test_patched_products_are_left(fused_mlp, device, monkeypatch, format, name):
    layer, answer = compiled_answer(fused_mlp, device, format)
    assert answer() is not None
    products = vars(bnb) if name else type(layer.weight)._TORCH_FN_TABLE[type(layer.weight)]
    monkeypatch.setitem(products, name or F.linear, lambda *given, **named: None)
    assert answer() is None


@torch.no_grad()
def test_weights_are_not_held(fused_mlp, device):
    """A replaced weight is freed: nothing else holds a reference to it."""
    fused = block(fused_mlp, device, "nested nf4")
    fused(input_on(device))
    old = weakref.ref(fused.q_proj.weight)
    new_weight(fused.q_proj, quantised(nn.Linear(WIDTH, WIDTH), "nested nf4", device))
    assert old() is None
