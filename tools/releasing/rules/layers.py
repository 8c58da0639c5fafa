"""The Hub's rules for layers, as `kernels` checks them when it replaces a module's forward by one."""

from types import ModuleType

LAYOUT = "Layout"  # a standalone companion: it has a constructor, and replaces no layer


def faults(kernel: ModuleType) -> list[str]:
    from kernels.layer.layer import _validate_layer  # imports torch, which publishing does not need

    found = []
    for name in kernel.layers.__all__:
        if name.endswith(LAYOUT):
            continue
        layer = getattr(kernel.layers, name)
        replaced = getattr(kernel.layers, name + LAYOUT, layer)  # at least its own companion
        try:
            _validate_layer(check_cls=replaced, cls=layer, repo=f"layers.{name}")
        except TypeError as error:
            found.append(str(error))
    return found
