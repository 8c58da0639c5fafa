"""What the tests of ops share."""

import importlib

import pytest


@pytest.fixture
def ops(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.backends.native")


@pytest.fixture
def written(fused_mlp):
    """A norm in operations of torch."""
    return importlib.import_module(f"{fused_mlp.__name__}.backends.reference").norm
