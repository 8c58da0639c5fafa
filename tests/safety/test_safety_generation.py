"""Text generation with fused models gives the same tokens with every kind of cache."""

import pytest
import torch

from safety import Blocks, alike, assert_close, llama, pair, ways

CACHES = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 0.7},
}


@ways
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_generation(fused_mlp, device, way, options):
    if options.get("cache_implementation") == "offloaded" and device.type == "cpu":
        options = options | {"cache_implementation": "dynamic"}  # offloading needs a GPU
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)
    options = {"do_sample": False} | options
    tokens = alike(lambda each: each.generate(ids, max_new_tokens=12, **options), fused, model)
    assert tokens[1].shape == (2, 21)
    assert torch.equal(*tokens)


@ways
def test_decoding_with_a_static_cache_compiled(fused_mlp, device, way):
    """A prompt and then token-by-token decoding, compiled with a static cache, give the unfused logits."""
    torch.compiler.reset()
    model, ids = llama(device)
    model, fused = pair(fused_mlp, way, model)
    from transformers import StaticCache

    logits = []
    for candidate in (fused, model):
        cache = StaticCache(config=candidate.config, max_cache_len=16)
        step = torch.compile(candidate, backend="aot_eager") if candidate is fused else candidate
        with torch.no_grad():
            logits.append([candidate(ids, past_key_values=cache).logits])
            for token in ids.T[:4]:
                logits[-1].append(step(token[:, None], past_key_values=cache).logits)
    assert_close(*logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_captured_in_a_cuda_graph(fused_mlp, way, dtype):
    """A captured graph replays with other inputs and with weights changed in place."""
    model, fused = pair(fused_mlp, way, Blocks().cuda().to(dtype))
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    x = torch.randn(4, 32, device="cuda", dtype=dtype)
    side = torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fused(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        for _ in range(3):
            x.normal_()
            for parameters in zip(model.parameters(), fused.parameters(), strict=True):
                for parameter in parameters:
                    parameter.mul_(1.1)
            graph.replay()
            assert_close(y, model(x), tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@ways
def test_generation_in_cuda_graphs(fused_mlp, way):
    """With a static cache on a GPU, where transformers compiles decoding with CUDA graphs, the tokens are the same."""
    torch.compiler.reset()
    model, ids = llama(torch.device("cuda"))
    model, fused = pair(fused_mlp, way, model)
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(fused.generate(ids, **options), model.generate(ids, **options))
