"""Fixtures shared by the tests of ops."""

import importlib

import pytest


@pytest.fixture
def ops(fused_mlp):
    return importlib.import_module(f"{fused_mlp.__name__}.backends.native")


@pytest.fixture
def written(fused_mlp):
    """A norm written in torch operations."""
    return importlib.import_module(f"{fused_mlp.__name__}.backends.reference").norm
