"""Fused models are copied, saved, loaded and moved like unfused ones."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from torch import nn

from modules import Gated
from safety import Blocks, assert_close, assert_same, kinds, llama, pair, states, ways, x_of


@ways
def test_the_state_dict(fused_mlp, device, way):
    model, ids = llama(device)
    other, _ = llama(device)
    model, fused = pair(fused_mlp, way, model)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in model.named_modules()]
    fused.load_state_dict(other.state_dict(), strict=True)
    assert_same(other, fused, ids)
    model.load_state_dict(fused.state_dict(), strict=True)
    assert_same(model, fused, ids)
    fused.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert_same(model, fused, ids)


@ways
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
@kinds
def test_weights_made_in_inference_mode(fused_mlp, device, way, kind, with_grad, training, bias):
    """Weights made in inference mode, as by loading a model in it, give the unfused result or error outside of it."""
    model, fused = pair(fused_mlp, way, kind(bias=bias).to(device).train(training))
    outcomes, x = [], x_of(device)
    for each in (model, fused):
        with torch.inference_mode():
            each._apply(torch.clone)
        with torch.set_grad_enabled(with_grad):
            for given in (x, x.clone().requires_grad_()):
                try:
                    result = each(given)
                    outcomes.append((result.detach(), result.requires_grad))
                except RuntimeError as error:
                    outcomes.append(str(error))
    for expected, got in zip(outcomes[:2], outcomes[2:], strict=True):
        assert type(got) is type(expected), f"{got}, expected {expected}"
        if isinstance(got, str):
            assert got == expected
        else:
            assert got[1] == expected[1]
            assert_close(got[0], expected[0])


@ways
def test_save_pretrained(fused_mlp, device, way, tmp_path):
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)
    fused.save_pretrained(tmp_path)
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(device), ids)


@ways
@kinds
def test_deepcopy_of_a_whole_model(fused_mlp, device, way, kind):
    model = nn.Sequential(kind(bias=True), nn.Dropout(0.5)).to(device).eval()
    model, fused = pair(fused_mlp, way, model)
    twin = copy.deepcopy(fused)
    assert states(fused_mlp, twin) == {"fused"}
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    assert_same(model, twin, x_of(device))


def test_torch_save_of_a_whole_model(fused_mlp, device):
    """A saved model loads with the original forward, with or without the package, and can be fused again.

    A model that `kernels.kernelize` changed does not pickle without the kernel: its forward is the kernel's function.
    """
    model = nn.Sequential(Blocks(), nn.Linear(32, 88), nn.GELU(), nn.Linear(88, 32)).to(device)
    model, fused = pair(fused_mlp, "fuse_mlps", model)
    fused_mlp.fuse_mlps(fused)
    saved = io.BytesIO()
    torch.save(fused, saved)
    assert f"{fused_mlp.__name__}.".encode() not in saved.getvalue()
    saved.seek(0)
    for loaded in (torch.load(saved, weights_only=False), pickle.loads(pickle.dumps(fused))):
        assert states(fused_mlp, loaded) == {"original"}
        assert_same(model, loaded, x_of(device))
        assert len(fused_mlp.fuse_mlps(loaded).fused) >= 2
        assert_same(model, loaded, x_of(device))


@ways
def test_emptied_and_loaded_again(fused_mlp, device, way):
    """A model moved to meta and loaded again, as big models are loaded, stays fused."""
    model, fused = pair(fused_mlp, way, Blocks().to(device))
    saved = copy.deepcopy(model.state_dict())
    fused.to("meta")
    assert fused(torch.empty(3, 7, 32, device="meta")).shape == (3, 7, 32)
    fused.to_empty(device=device).load_state_dict(saved)
    assert states(fused_mlp, fused) == {"fused"}
    assert_same(model, fused, x_of(device))


@ways
def test_fused_on_meta(fused_mlp, device, way):
    with torch.device("meta"):
        fused = Blocks()
    model, fused = Blocks().to(device), pair(fused_mlp, way, fused)[1]
    fused.to_empty(device=device).load_state_dict(model.state_dict())
    assert_same(model, fused, x_of(device))


@ways
def test_moved_to_other_dtypes(fused_mlp, device, way):
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)
    for dtype, tolerance in (
        (torch.float64, 1e-9),
        (torch.bfloat16, 3e-2),
        (torch.float16, 5e-3),
        (torch.float32, 1e-4),
    ):
        model.to(dtype), fused.to(dtype)
        with torch.no_grad():
            got, expected = fused(ids).logits, model(ids).logits
        assert got.dtype == expected.dtype == dtype
        assert (got.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to move to")
@ways
def test_moved_to_the_gpu_and_back(fused_mlp, way):
    model, fused = pair(fused_mlp, way, Gated(bias=True).cuda())
    for device in ("cpu", "cuda"):
        model.to(device), fused.to(device)
        assert_same(model, fused, x_of(device))


@ways
def test_shared_memory(fused_mlp, way):
    model, fused = pair(fused_mlp, way, Gated(bias=True))
    fused.share_memory()
    assert_same(model, fused, x_of("cpu"))


@ways
def test_weights_that_are_views(fused_mlp, device, way):
    """Weights set as plain tensor views, as wrappers that flatten parameters set them, get the right gradients."""
    model, fused = pair(fused_mlp, way, Gated(bias=True).to(device))
    for candidate in (model, fused):
        weight = candidate.up_proj.weight
        candidate.flat = nn.Parameter(weight.detach().flatten())
        del candidate.up_proj.weight
        candidate.up_proj.weight = candidate.flat.view(88, 32)
    x = x_of(device)
    gradients = [torch.autograd.grad(candidate(x).square().sum(), candidate.flat)[0] for candidate in (model, fused)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
