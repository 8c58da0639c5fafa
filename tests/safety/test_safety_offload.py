"""accelerate's hooks, which load weights or move arguments for each call, attached before and after fusing."""

import copy
import functools
import importlib
from types import MethodType

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

from modules import Gated
from safety import assert_same, fuse, llama, mlps, pair, states, ways, x_of


def offload(model, device, folder):
    """Every module with parameters loads its own for each call."""
    return accelerate.cpu_offload(model, execution_device=device)


def offload_to_disk(model, device, folder):
    return accelerate.disk_offload(model, folder, execution_device=device)


def dispatch(model, device, folder):
    """A device map like that of `device_map="auto"` for a big model: the first layer on disk, the second in memory."""
    places = {"model.layers.0": "disk", "model.layers.1": "cpu"}
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places |= dict.fromkeys(rest, device if device.type == "cuda" else "cpu")
    return accelerate.dispatch_model(model, places, main_device=device, offload_dir=folder, force_hooks=True)


def hook_whole_mlps(model, device, folder):
    """A hook on each MLP loads the weights of its projections, which have no hooks of their own."""
    for mlp in mlps(model):
        weights = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
        hook = AlignDevicesHook(device, offload=True, io_same_device=True, place_submodules=True, weights_map=weights)
        add_hook_to_module(mlp, hook)
    return model


# kernelize is not run on a hooked model: it resets the forwards of all classes it knows, which drops their hooks.
@pytest.mark.parametrize(("when", "way"), [("before", "fuse_mlps"), ("after", "fuse_mlps"), ("after", "kernelize")])
@pytest.mark.parametrize("place", [offload, offload_to_disk, dispatch, hook_whole_mlps])
def test_offloaded(fused_mlp, device, tmp_path, way, when, place):
    model, ids = llama(device)
    fused = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(ids).logits
        if when == "after":
            fuse(fused_mlp, way, fused)
        fused = place(fused, device, tmp_path)
        if when == "before":
            fuse(fused_mlp, way, fused)
        for _ in range(2):
            torch.testing.assert_close(fused(ids).logits, expected, rtol=1e-4, atol=1e-5)


def spread(model, device):
    """The hooks of a device map like that of `device_map="auto"` over several GPUs: weights stay where they are."""
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    return accelerate.dispatch_model(model, dict.fromkeys(names, device), main_device=device, force_hooks=True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_spread_over_devices(fused_mlp, device, called_ops, when):
    """Hooks that only move arguments are skipped inside fused calls, with the same ops and bits as without hooks."""
    model, ids = llama(device)
    model, fused = pair(fused_mlp, "fuse_mlps", model)
    spread_model = spread(copy.deepcopy(model), device) if when == "before" else copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(spread_model)
    spread_model = spread(spread_model, device) if when == "after" else spread_model
    with torch.no_grad():
        spread_model(ids)  # compiled code learns the hooks
        ops = []
        for each in (fused, spread_model):
            called_ops.clear()
            ops.append((each(ids).logits, [*called_ops]))
    assert ops[0][1] == ops[1][1] and "residual_gated_mlp" in ops[1][1]
    assert torch.equal(ops[0][0], ops[1][0])
    assert states(fused_mlp, spread_model) == {"fused"}
    for each in (copy.deepcopy(spread_model), spread_model):
        assert_same(model, each, ids)
    report.restore()
    assert states(fused_mlp, spread_model) == {"original"}
    assert_same(model, spread_model, ids)
    remove_hook_from_module(spread_model, recurse=True)
    assert_same(model, spread_model, ids)
    assert not any("fused" in repr(value) for module in spread_model.modules() for value in vars(module).values())


class Doubling(AlignDevicesHook):
    def post_forward(self, module, output):
        return 2 * super().post_forward(module, output)


def doubled(function):
    """A function whose floating-point results are doubled."""

    def twice(found):
        return 2 * found if isinstance(found, torch.Tensor) and found.is_floating_point() else found

    def call(*given, **named):
        found = function(*given, **named)
        return tuple(map(twice, found)) if type(found) is tuple else twice(found)

    return call


def by_a_subclass(layer, monkeypatch):
    add_hook_to_module(layer, Doubling(layer.weight.device))


def by_another_hook(layer, monkeypatch):
    add_hook_to_module(layer, Doubling(layer.weight.device), append=True)


def by_its_own_method(layer, monkeypatch):
    layer._hf_hook.post_forward = doubled(layer._hf_hook.post_forward)


def by_a_patched_class(layer, monkeypatch):
    monkeypatch.setattr(AlignDevicesHook, "post_forward", doubled(AlignDevicesHook.post_forward))


def by_a_patched_function(layer, monkeypatch):
    monkeypatch.setattr(accelerate.hooks, "send_to_device", doubled(accelerate.hooks.send_to_device))


def by_the_forward_inside(layer, monkeypatch):
    layer._old_forward = doubled(layer._old_forward)


def by_an_argument(layer, monkeypatch):
    other = copy.deepcopy(layer)
    other.weight.data *= 2
    layer.forward = functools.partial(layer.forward.func, other)


@pytest.mark.parametrize(
    "change",
    [
        by_a_subclass,
        by_another_hook,
        by_its_own_method,
        by_a_patched_class,
        by_a_patched_function,
        by_the_forward_inside,
        by_an_argument,
    ],
)
def test_a_changed_hook_runs(fused_mlp, device, monkeypatch, change):
    """A hook that does more than moving arguments, or around another forward, runs."""
    model, ids = llama(device)
    model = spread(model, device)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    with torch.no_grad():
        for _ in range(2):
            before = fused(ids).logits
        for each in (model, fused):
            change(mlps(each)[1].up_proj, monkeypatch)
        expected = model(ids).logits
        assert not torch.allclose(expected, before)
        for _ in range(2):
            torch.testing.assert_close(fused(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_hook_class_that_was_wrapped_before(fused_mlp, device, monkeypatch):
    """A wrapper that copies the names of what it wraps is no original, even if it is the first to be seen."""
    device_hooks = importlib.import_module(f"{fused_mlp.__name__}.models.reading.device_hooks")
    monkeypatch.delitem(device_hooks.KNOWN, AlignDevicesHook, raising=False)
    post = AlignDevicesHook.post_forward
    monkeypatch.setattr(AlignDevicesHook, "post_forward", functools.wraps(post)(doubled(post)))
    model, ids = llama(device)
    model = spread(model, device)
    fused = copy.deepcopy(model)
    fused_mlp.fuse_mlps(fused)
    assert_same(model, fused, ids)
    assert device_hooks.KNOWN.pop(AlignDevicesHook) is None


@ways
def test_hooks_removed_again(fused_mlp, device, tmp_path, way):
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)
    fused = dispatch(fused, device, tmp_path)
    assert "fused" not in states(fused_mlp, fused)
    remove_hook_from_module(fused, recurse=True)
    fused.load_state_dict(model.state_dict(), assign=True)
    assert states(fused_mlp, fused) == {"fused"}
    assert_same(model, fused, ids)


def test_restored_under_a_hook(fused_mlp, device):
    """restore() removes our forward and keeps accelerate's, which wraps it."""
    model, ids = llama(device)
    fused = copy.deepcopy(model)
    report = fused_mlp.fuse_mlps(fused)
    for mlp in mlps(fused):
        add_hook_to_module(mlp, AlignDevicesHook(device, io_same_device=True))
    hooked = [vars(mlp)["forward"] for mlp in mlps(fused)]
    report.restore()
    assert [vars(mlp)["forward"] for mlp in mlps(fused)] == hooked
    assert_same(model, fused, ids)
    remove_hook_from_module(fused, recurse=True)
    assert_same(model, fused, ids)
    assert len(fused_mlp.fuse_mlps(fused).fused) == len(hooked)


def test_restored_under_a_wrapper(fused_mlp, device):
    """restore() works under a functools.wraps wrapper, which copies the attributes of the fused method."""
    module = Gated().to(device)
    plain = copy.deepcopy(module)
    report = fused_mlp.fuse_mlps(module)
    method = module.forward.__func__

    @functools.wraps(method)
    def doubled(self, x):
        return 2 * method(self, x)

    module.forward = MethodType(doubled, module)
    x = x_of(device)
    for _ in range(2):
        torch.testing.assert_close(module(x), 2 * plain(x))
        report.restore()


def test_a_kernelized_linear_is_offloaded(fused_mlp, device):
    """The package's Linear layer counts as nn.Linear's forward, but accelerate's wrapper around it does not."""
    module = Gated(bias=True).to(device)
    plain = copy.deepcopy(module)
    for projection in (module.gate_proj, module.up_proj, module.down_proj):
        projection.forward = fused_mlp.layers.Linear.forward.__get__(projection)
    fused_mlp.fuse_mlps(module)
    x = x_of(device)
    with torch.no_grad():
        assert fused_mlp.explain(module).implementation == "fused"
        torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-5)
        module = accelerate.cpu_offload(module, execution_device=device)
        assert fused_mlp.explain(module).implementation != "fused"
        torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-5)
