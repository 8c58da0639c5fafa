"""Layers of transformers that run their MLP on chunks: with a single chunk, the fused method is called directly."""

import copy
import inspect
from types import MethodType

import pytest
import torch
from transformers import BertConfig, DistilBertConfig
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.distilbert.modeling_distilbert import FFN

from safety import assert_close, warmed, x_of


def bert_layer():
    config = BertConfig(hidden_size=32, intermediate_size=88, num_attention_heads=4)
    config._attn_implementation = "eager"
    return BertLayer(config)


def distilbert_mlp():
    return FFN(DistilBertConfig(dim=32, hidden_dim=88))


KINDS = {"forward of a layer": bert_layer, "forward of an MLP": distilbert_mlp}


@pytest.fixture(params=KINDS)
def pair(request, fused_mlp, device):
    torch.manual_seed(0)
    return warmed(fused_mlp, KINDS[request.param]().to(device).eval(), x_of(device))


@pytest.fixture
def signatures(monkeypatch):
    """Collects the names of chunk methods whose signature is inspected."""
    asked, signature = [], inspect.signature

    def tell(of, **options):
        asked.extend([of.__name__] if isinstance(of, MethodType) else [])
        return signature(of, **options)

    monkeypatch.setattr(inspect, "signature", tell)
    return asked


def name_of_chunk(module):
    return "ff_chunk" if isinstance(module, FFN) else "feed_forward_chunk"


def outputs(module, x):
    with torch.no_grad():
        found = module(x)
    return found[0] if isinstance(found, tuple) else found


def test_one_chunk(device, pair, signatures):
    module, fused = pair
    x = x_of(device)
    expected = outputs(module, x)
    assert signatures == [name_of_chunk(module)]
    signatures.clear()
    assert_close(outputs(fused, x), expected)
    assert not signatures


@pytest.mark.parametrize("size", [2, True, 5])
def test_other_chunks(device, pair, signatures, size):
    """Other chunk sizes run as unfused: 2, True (equal to 1), and one that does not divide the rows."""
    module, fused = pair
    x = x_of(device, 3, 6)
    for each in pair:
        each.chunk_size_feed_forward = size
    if size == 5:
        for each in pair:
            with pytest.raises(ValueError, match="multiple of the chunk size"):
                outputs(each, x)
    else:
        assert_close(outputs(fused, x), outputs(module, x))
    assert signatures == 2 * [name_of_chunk(module)]


@pytest.mark.parametrize("owner", ["class", "instance"])
def test_another_method(device, pair, monkeypatch, owner):
    module, fused = pair
    for each in pair if owner == "instance" else [type(module)]:
        monkeypatch.setattr(each, name_of_chunk(module), lambda *given: 2 * given[-1], raising=False)
    x = x_of(device)
    assert_close(outputs(fused, x), outputs(module, x))


def test_another_number_of_arguments(device, pair):
    for each in pair:
        setattr(each, name_of_chunk(each), lambda x, y: x)
        with pytest.raises(ValueError, match="expects 2 arguments"):
            outputs(each, x_of(device))


def test_a_patched_function(fused_mlp, device, monkeypatch):
    torch.manual_seed(0)
    module = bert_layer().to(device).eval()
    fused = copy.deepcopy(module)
    fused_mlp.fuse_mlps(fused)
    monkeypatch.setattr(modeling_bert, "apply_chunking_to_forward", lambda method, size, dim, x: 3 * method(x))
    x = x_of(device)
    assert_close(outputs(fused, x), outputs(module, x))


def test_a_forward_of_its_own_is_left(fused_mlp, device):
    """A layer whose forward accelerate replaced keeps it; the methods that it calls are fused."""
    module = bert_layer().to(device).eval()
    fused = copy.deepcopy(module)
    forward = fused.forward
    fused.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    report = fused_mlp.fuse_mlps(fused)
    found = {entry.path: entry.extent for entry in report.modules}
    assert found == {"": "full", "attention.output": "full"}
    x = x_of(device)
    assert_close(outputs(fused, x), outputs(module, x))
    report.restore()
    assert_close(outputs(fused, x), outputs(module, x))
