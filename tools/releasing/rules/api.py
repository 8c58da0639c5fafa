"""Compares the public API of a version, which users may rely on, with a snapshot in this folder."""

import ast
import difflib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

import project

RULE = (
    "The Hub's rule: whatever is added to, removed from or changed in the public API of a version is a new version, as "
    "builds of the old one stay in use. Raise the version in build.toml, then run `python tools/release.py snapshot`."
)


def snapshot() -> Path:
    return Path(__file__).parent / f"v{project.version()}.txt"


def faults(kernel: ModuleType) -> list[str]:
    """Lists the differences between the API of a loaded kernel and the snapshot of its version, line by line."""
    path = snapshot()
    if not path.is_file():
        return [f"there is no snapshot {path.name} of this version's API: write it with tools/release.py snapshot"]
    lines = difflib.ndiff(path.read_text().splitlines(), describe(kernel))
    differences = [line for line in lines if line.startswith(("+ ", "- "))]
    return [*differences, RULE] if differences else []


def describe(kernel: ModuleType) -> list[str]:
    """One line for every function, layer, activation and op, with everything that a call depends on."""
    lines = []
    for name in sorted(kernel.__all__):
        value = getattr(kernel, name)
        lines += _layers(value) if inspect.ismodule(value) else _function(name, value)
    return [*lines, *_activations(kernel.__name__), *_ops(kernel.__name__)]


def exported() -> list[str]:
    """`__all__` read from the source, for use without a build."""
    tree = ast.parse((project.package() / "__init__.py").read_text())
    (assigned,) = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return ast.literal_eval(assigned.value)


def _function(name: str, function) -> Iterator[str]:
    yield f"{name}{_signature(function)}"
    result = inspect.get_annotations(inspect.unwrap(function), eval_str=True).get("return")
    if is_dataclass(result):
        members = {field.name for field in fields(result)} | set(vars(result))
        yield from (f"{name}(...).{member}" for member in sorted(members) if not member.startswith("_"))


def _layers(module: ModuleType) -> Iterator[str]:
    import torch  # takes seconds, and publishing does not need it

    for name in sorted(module.__all__):
        layer = getattr(module, name)
        flags = [
            f"{flag}={getattr(layer, flag)}" for flag in ("has_backward", "can_torch_compile") if hasattr(layer, flag)
        ]
        yield " ".join([f"layers.{name}.forward{_signature(layer.forward)}", *flags])
        if layer.__init__ is not torch.nn.Module.__init__:
            yield f"layers.{name}{_signature(layer.__init__)}"


def _activations(package: str) -> list[str]:
    """Lists the values of `activation`, with the number that the ops use for each."""
    table = sys.modules[f"{package}.activations"].ACTIVATIONS
    return sorted(f"activation {name!r}: {row.code}" for row in table for name in (row.name, *row.aliases))


def _ops(namespace: str) -> list[str]:
    import torch

    # The namespace differs between builds; its contents do not.
    schemas = [str(schema) for schema in torch._C._jit_get_all_schemas()]
    return sorted(schema.replace(f"{namespace}::", "ops.") for schema in schemas if schema.startswith(f"{namespace}::"))


def _signature(function) -> str:
    """The signature without annotations, which bind no caller and which Python versions print differently."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
