"""Gradients of every subset of operands: their values, the memory saved for them, and in-place changes before backward.

Eager PyTorch is the reference for all three.
"""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import machine
import measure
import reference
from safety import assert_close

# Positions of the operands in the op.
PLACES = {
    "linear": {"x": 0, "weight": 1, "bias": 4},
    "mlp": {"x": 0, "fc1_weight": 1, "fc2_weight": 3, "fc1_bias": 4, "fc2_bias": 6},
    "gated_linear": {"x": 0, "gate_weight": 1, "up_weight": 2, "gate_bias": 4, "up_bias": 5},
    "packed_gated": {"x": 0, "weight": 1, "second_weight": 3, "bias": 4, "second_bias": 6},
}
PLACES["gated_mlp"] = {**PLACES["gated_linear"], "down_weight": 3, "down_bias": 6}
KINDS = [kind for kind in PLACES if kind != "linear" or machine.device_type() == "cpu"]
kinds = pytest.mark.parametrize("kind", KINDS)
biases = pytest.mark.parametrize("biases", [True, False], ids=["biases", "no biases"])
memories = pytest.mark.parametrize("memory", ["activations", "recompute"])
SIZES = (24, 88, 16)


@pytest.mark.parametrize("trains_norm", [False, True])
def test_a_block_saves_its_input_for_the_norm_alone(fused_mlp, device, trains_norm):
    """An operand that no gradient needs may change in place before the backward, as in eager PyTorch."""
    blocks = sys.modules[f"{fused_mlp.__name__}.autograd.blocks"]
    code = sys.modules[f"{fused_mlp.__name__}.activations"].get_activation("gelu").code
    x, *layers = reference.operands("mlp", (64,), (24, 88, 24), device=device).values()
    fc1, fc2, *biases = [each.requires_grad_() for each in layers]
    norm = [torch.rand(24, device=device, requires_grad=trains_norm) for _ in range(2)]

    def eager(x):
        hidden = F.gelu(F.linear(F.layer_norm(x, (24,), *norm, 1e-5), fc1, biases[0]))
        return x + F.linear(hidden, fc2, biases[1])

    def ours(x):
        given = (fc1, None, fc2, biases[0], None, biases[1], None, *norm, (1e-5, 1, code, None, True, 0.0))
        return blocks.pre_normed(x, *given)

    def gradients(block):
        changed = x.clone()
        y = block(changed)
        changed.add_(1.0)
        return torch.autograd.grad(y.square().sum(), [*layers, *norm] if trains_norm else layers)

    if trains_norm:
        for block in (eager, ours):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(block)
    else:
        for found, expected in zip(gradients(ours), gradients(eager), strict=True):
            assert_close(found, expected)


def operands(kind, device, biases, rows=64, sizes=SIZES):
    if kind != "packed_gated":
        return reference.operands(kind, (rows,), sizes, device=device, biases=biases)
    made = reference.operands("mlp", (rows,), (sizes[0], 2 * sizes[1], sizes[2]), device=device, biases=biases)
    made["fc2_weight"] = made["fc2_weight"][:, ::2].contiguous()
    return dict(zip(PLACES[kind], made.values(), strict=False))


def call(fused_mlp, kind, made, memory="activations", activation="silu"):
    with fused_mlp.backend(machine.device_type()):
        if kind == "linear":
            return fused_mlp.linear(**made, activation=activation)
        if kind != "packed_gated":
            return getattr(fused_mlp, kind)(**made, activation=activation, memory=memory)
        calls, activations = (sys.modules[f"{fused_mlp.__name__}.{name}"] for name in ("calls", "activations"))
        names = ("x", "weight", None, "second_weight", "bias", None, "second_bias")
        given = tuple(made.get(name) for name in names)
        return calls.in_one_op("gated_mlp", given, activations.get_activation(activation), memory, up_first=True)


def eager(kind, made, activation="silu"):
    if kind != "packed_gated":
        return reference.eager(kind, made, activation)
    up, gate = F.linear(made["x"], made["weight"], made.get("bias")).chunk(2, dim=-1)
    hidden = reference.FORMULAS[activation].eager(gate) * up
    return F.linear(hidden, made["second_weight"], made.get("second_bias"))


def subsets(made):
    return itertools.chain.from_iterable(itertools.combinations(made, count) for count in range(1, len(made) + 1))


def wanting(made, of):
    """Fresh operands as in a model: the input and every other one are computed, the rest are leaves."""
    leaves = {name: tensor.clone().requires_grad_(name in of) for name, tensor in made.items()}
    computed = {name: leaf * 1 if place % 2 == 0 else leaf for place, (name, leaf) in enumerate(leaves.items())}
    return computed, [computed[name] for name in of]


class Saved:
    """The storages that autograd saves: which operands they hold, and their bytes without weights and biases."""

    def __init__(self, made, compute):
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.result = compute(made)
        at = {name: tensor.untyped_storage().data_ptr() for name, tensor in made.items()}
        self.operands = {name for name in made if at[name] in storages}
        self.bytes = sum(storages.values()) - sum(storages[at[name]] for name in self.operands - {"x"})


@memories
@biases
@kinds
def test_what_is_saved(fused_mlp, device, kind, biases, memory):
    made = operands(kind, device, biases)
    for of in subsets(made):
        given, _ = wanting(made, of)
        expected = Saved(given, lambda given: eager(kind, given))
        found = Saved(given, lambda given: call(fused_mlp, kind, given, memory))
        assert found.bytes <= expected.bytes + 64, (of, found.operands, expected.operands)
        if memory == "activations":
            assert found.operands <= expected.operands, of


@biases
@kinds
def test_what_is_not_saved_may_change(fused_mlp, device, kind, biases):
    """Operands that eager does not save may change in place before the backward, by an optimizer or a residual sum."""
    made = operands(kind, device, biases)
    for of in subsets(made):
        given, wanted = wanting(made, of)
        unsaved = made.keys() - Saved(given, lambda given: eager(kind, given)).operands
        expected = torch.autograd.grad(eager(kind, given).square().sum(), wanted)
        result = call(fused_mlp, kind, given)
        with torch.no_grad():
            for name in unsaved:
                given[name].add_(1.0)
        assert_close(torch.autograd.grad(result.square().sum(), wanted), expected)


class Asked(TorchDispatchMode):
    """Records the positions of the gradients that each backward computes, from the bit mask passed to the op."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "training_backward" in function.name():
            self.places.append([place for place in range(7) if args[10] >> place & 1])
        return function(*args, **(kwargs or {}))


@memories
@biases
@kinds
def test_one_gradient_of_many(fused_mlp, device, kind, biases, memory):
    """``autograd.grad`` of one operand, a leaf or not, skips the other gradients even if all operands require one.

    There are enough rows that skipping gradients saves more time than finding out which ones are requested.
    """
    made = operands(kind, device, biases, rows=1024, sizes=(32, 88, 48))
    for computed in (False, True):
        given = {name: tensor.clone().requires_grad_() for name, tensor in made.items()}
        given = {name: leaf * 1 if computed else leaf for name, leaf in given.items()}
        for of in subsets(made):
            if 2 < len(of) < len(made):
                continue
            wanted, result = [given[name] for name in of], call(fused_mlp, kind, given, memory)
            expected = torch.autograd.grad(eager(kind, given).square().sum(), wanted)
            with Asked() as asked:
                found = torch.autograd.grad(result.square().sum(), wanted, retain_graph=True)
            places, (found_places,) = {PLACES[kind][name] for name in of}, asked.places
            assert places == {place for place in found_places if place in places or place - 3 not in places}
            assert_close(found, expected)
            assert_close(torch.autograd.grad(result.square().sum(), wanted), expected)


def test_backward_of_some_inputs(fused_mlp, device):
    """Tensor.backward(inputs=...) fills only the gradients of the given leaves when two MLPs share them in sequence."""
    made = operands("mlp", device, True, sizes=(24, 88, 24))
    given = {name: tensor.clone().requires_grad_() for name, tensor in made.items()}

    def twice(compute):
        return compute({**given, "x": compute(given)})

    for of in subsets(made):
        wanted = [given[name] for name in of]
        found = []
        for compute in (lambda given: call(fused_mlp, "mlp", given), lambda given: eager("mlp", given)):
            twice(compute).square().sum().backward(inputs=wanted)
            found.append([given[name].grad for name in made])
            for tensor in given.values():
                tensor.grad = None
        for got, expected in zip(*found, strict=True):
            assert (got is None) == (expected is None)
            assert_close(got, expected)


@memories
@biases
@kinds
def test_gradients_of_gradients(fused_mlp, device, kind, biases, memory):
    """Second derivatives are right for every subset of operands, though the others are not saved."""
    made = operands(kind, device, biases, rows=8)
    for of in subsets(made):
        found = []
        for compute in (lambda given: call(fused_mlp, kind, given, memory), lambda given: eager(kind, given)):
            given, wanted = wanting(made, of)
            first = torch.autograd.grad(compute(given).square().sum(), wanted, create_graph=True)
            second = torch.autograd.grad(sum(each.square().sum() for each in first), wanted, allow_unused=True)
            found.append((first, second))
        for got, expected in zip(found[0][1], found[1][1], strict=True):
            assert expected is None or got is not None
            assert_close(got, expected, tolerance=1e-3)


SIZES_OF_MEMORY = [((24, 88, 16), torch.float32), ((96, 40, 64), torch.float32)]
if machine.has_tiles():  # otherwise oneDNN's products take up to 24 KiB more by operands, ours and eager's
    SIZES_OF_MEMORY += [((96, 352, 64), torch.bfloat16)]


@pytest.mark.parametrize(("sizes", "dtype"), SIZES_OF_MEMORY, ids=str)
@memories
@biases
@kinds
def test_memory_of_subsets(fused_mlp, device, kind, biases, memory, sizes, dtype):
    """Neither the memory kept for the backward nor the peak of forward and backward exceeds eager's."""
    rows = 512 if dtype == torch.float32 else 128
    made = {name: each.to(dtype) for name, each in operands(kind, device, biases, rows=rows, sizes=sizes).items()}
    grad = torch.randn_like(eager(kind, made))
    for of in subsets(made):
        if 2 < len(of) < len(made) - 1:
            continue
        given = {name: tensor.clone().requires_grad_(name in of) for name, tensor in made.items()}
        wanted = [given[name] for name in of]
        found = []
        for compute in (lambda given: call(fused_mlp, kind, given, memory), lambda given: eager(kind, given)):
            for _ in range(2):  # the first run may load something
                bytes_of = measure.saved_and_peak(
                    lambda compute=compute, given=given: compute(given),
                    lambda result, wanted=wanted: torch.autograd.grad(result, wanted, grad),
                )
            found.append(bytes_of)
        (kept, most), (saved, peak) = found
        slack = 512 * 8 if device.type == "cuda" else 128  # allocator granularity
        assert kept <= saved + slack, of
        assert most <= peak + slack, of


@pytest.mark.skipif(machine.device_type() != "cpu", reason="the kernels of a GPU write both")
def test_peak_of_a_forward_with_relu(fused_mlp, device):
    """The forward writes ReLU's values over its inputs, so it keeps no more and peaks no higher than eager."""
    made = operands("mlp", device, True, rows=600, sizes=(24, 88, 16))
    given = {name: tensor.requires_grad_() for name, tensor in made.items()}

    def by_torch():
        hidden = F.relu(F.linear(given["x"], given["fc1_weight"], given["fc1_bias"]))
        return F.linear(hidden, given["fc2_weight"], given["fc2_bias"])

    computes = (lambda: call(fused_mlp, "mlp", given, activation="relu"), by_torch)
    found = [measure.saved_and_peak(compute, lambda _: None) for compute in computes * 2]
    (kept, most), (saved, peak) = found[2:]  # the first run may load something
    assert kept <= saved + 128 and most <= peak + 128


def test_an_optimizer_between_backwards(fused_mlp, device):
    """An optimizer step between two backwards gives eager's biases when only the biases are trained."""
    made = operands("mlp", device, True)
    found = []
    for compute in (lambda given: call(fused_mlp, "mlp", given), lambda given: eager("mlp", given)):
        leaves = {name: tensor.clone() for name, tensor in made.items()}
        biases = [leaves[name].requires_grad_() for name in ("fc1_bias", "fc2_bias")]
        optimizer = torch.optim.SGD(biases, lr=0.1)
        losses = [compute({**leaves, "x": leaves["x"] + biases[1][0]}).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
            optimizer.step()
        found.append(biases)
    assert_close(*found)


def test_a_residual_sum_in_place(fused_mlp, device):
    """x may be updated in place by the output of an MLP with frozen weights; first and second derivatives are right."""
    made = operands("mlp", device, True, sizes=(24, 88, 24))
    found = []
    for compute in (lambda given: call(fused_mlp, "mlp", given), lambda given: eager("mlp", given)):
        leaf = made["x"].clone().requires_grad_()
        x = leaf * 2
        for _ in range(2):
            x += compute({**made, "x": x})
        (first,) = torch.autograd.grad(x.square().mean(), leaf, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), leaf)))
    assert_close(*found)
