"""The installed versions of libraries whose classes are read by their source are known."""

import importlib
import importlib.metadata

import pytest
from peft.tuners.lora import layer as lora
from transformers.integrations import finegrained_fp8
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

# The module that reads a class, and the class, or its path if it may be missing.
READ = {
    "Linear of peft": ("parts.adapters", lora.Linear),
    "Linear4bit of peft": ("parts.adapters", "peft.tuners.lora.bnb.Linear4bit"),
    "Linear8bitLt of peft": ("parts.adapters", "peft.tuners.lora.bnb.Linear8bitLt"),
    "TorchaoLoraLinear of peft": ("parts.adapters", "peft.tuners.lora.torchao.TorchaoLoraLinear"),
    "ParamWrapper of peft": ("experts.wrappers", lora.ParamWrapper),
    "Linear4bit of bitsandbytes": ("parts.quantized", "bitsandbytes.nn.modules.Linear4bit"),
    "Linear8bitLt of bitsandbytes": ("parts.quantized", "bitsandbytes.nn.modules.Linear8bitLt"),
    "FP8Linear of transformers": ("parts.quantized", finegrained_fp8.FP8Linear),
    "CompressedTensorsFP8Linear of transformers": ("parts.quantized", CompressedTensorsFP8Linear),
    "Int8Tensor of torchao": ("parts.quantized", "torchao.quantization.Int8Tensor"),
    "Float8Tensor of torchao": ("parts.quantized", "torchao.quantization.Float8Tensor"),
    "Int4TilePackedTo4dTensor of torchao": ("parts.quantized", "torchao.quantization.Int4TilePackedTo4dTensor"),
}


def number(version):
    return tuple(map(int, version.split(".")[:2]))


@pytest.mark.parametrize("name", READ)
def test_the_installed_version_is_known(fused_mlp, name):
    """Each form is listed under the first version that has it; the installed one is the latest up to its version."""
    place, kind = READ[name]
    if isinstance(kind, str):
        home, _, attribute = kind.rpartition(".")
        kind = getattr(pytest.importorskip(home, reason=f"no {home} here", exc_type=ImportError), attribute)
    read = importlib.import_module(f"{fused_mlp.__name__}.models.{place}")
    if "Tensor of" in name:
        forms, found = read.TENSOR_DIGESTS, read.digest_of_tensor(kind)
    elif place == "parts.quantized":
        forms, found = read.CLASSES[f"{kind.__module__}.{kind.__qualname__}"].digests, read.digest_of(kind)
    else:
        forms, found = read._DIGESTS, read.digest(kind)
        forms = forms.get(f"{kind.__module__}.{kind.__qualname__}", forms)
    versions = list(map(number, forms.values()))
    assert "Tensor of" in name or versions == sorted(set(versions))
    installed = number(importlib.metadata.version(name.split()[-1]))
    assert number(forms[found]) == max(version for version in versions if version <= installed)
