"""accelerate's hooks, which load weights for each call, attached before and after fusing."""

import copy
import functools
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
