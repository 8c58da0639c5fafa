"""DLPack's structures in torch-ext/operands/dlpack.h are declared as in torch's copy of the standard's header."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import project

SOURCE = """
#include <ATen/dlpack.h>
#include <cstddef>
#include "dlpack.h"

namespace ours = fused_mlp::dlpack;
#define SAME(OURS, MEMBER, THEIRS, OTHER) static_assert(offsetof(ours::OURS, MEMBER) == offsetof(THEIRS, OTHER))

static_assert(ours::kMajorVersion == DLPACK_MAJOR_VERSION);
static_assert(sizeof(ours::Tensor) == sizeof(DLTensor));
SAME(Tensor, data, DLTensor, data);
SAME(Tensor, device.type, DLTensor, device.device_type);
SAME(Tensor, device.index, DLTensor, device.device_id);
SAME(Tensor, dims, DLTensor, ndim);
SAME(Tensor, dtype.code, DLTensor, dtype.code);
SAME(Tensor, dtype.bits, DLTensor, dtype.bits);
SAME(Tensor, dtype.lanes, DLTensor, dtype.lanes);
SAME(Tensor, sizes, DLTensor, shape);
SAME(Tensor, strides, DLTensor, strides);
SAME(Tensor, byte_offset, DLTensor, byte_offset);
static_assert(ours::kFloat32.code == kDLFloat && ours::kFloat16.code == kDLFloat && ours::kBFloat16.code == kDLBfloat);

static_assert(sizeof(ours::ExchangeApi) == sizeof(DLPackExchangeAPI));
SAME(ExchangeApi, major_version, DLPackExchangeAPI, header.version.major);
SAME(ExchangeApi, previous, DLPackExchangeAPI, header.prev_api);
SAME(ExchangeApi, read, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
SAME(ExchangeApi, current_stream, DLPackExchangeAPI, current_work_stream);
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_layouts():
    folders = project.ROOT / "torch-ext/operands", Path(torch.__file__).parent / "include"
    command = ["c++", "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", *(f"-I{each}" for each in folders)]
    done = subprocess.run([*command, "-x", "c++", "-"], input=SOURCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_exchange_is_there():
    """The exchange exists in every torch that the package supports: without it all ops are called."""
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
