"""Transformers models with tiny configurations, for any model type."""

import importlib
import inspect
import re
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

MAX_PARAMETERS = 400_000_000


# Options of a configuration, by the end of their names, and their new values. The widths of an MLP differ from all
# others, which distinguishes its layers from those of an attention.
def _widths(width: int, hidden: int) -> tuple[tuple[str, int], ...]:
    """The first match counts."""
    return (
        (r"intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|intermediate_dim|mlp_dim|feedforward\w*", hidden),
        (r"hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|width|n_embed|embedding_size|emb_dim", width),
        (r"(key_value|kv)_heads", 2),
        (r"heads|n_head", 4),
        (r"head_dim", width // 4),
    )


_COUNTS = ((r"layers?|blocks|depth|hidden_groups", 2), (r"vocab_size", 256), (r"experts", 4))

# Options that a configuration needs to make a model.
_REQUIRED = {name: {"prediction_length": 8} for name in ("autoformer", "informer", "time_series_transformer")}


class NoModelError(Exception):
    """A model type that has no model, or none that can be built here."""


def model_types() -> list[str]:
    return sorted(CONFIG_MAPPING)


def build(model_type: str, width: int = 64, hidden: int = 96) -> PreTrainedModel:
    """A model of that type with random weights, as small as its configuration allows: two layers, with `width` features
    between them and `hidden` within an MLP if possible.

    Raises NoModelError with the reason if there is no such model.
    """
    error: Exception = NoModelError("part of another model")
    for config_class, model_class in _classes(model_type):
        small, often_none = _widths(width, hidden), {"head_dim": width // 4, "num_key_value_heads": 2}
        for widths, unset in ((small, {}), (small, often_none), ((), {})):
            try:
                config = config_class(**_REQUIRED.get(model_type, {}))
                return _build(model_class, _shrunk(config, widths, unset))
            except TimeoutError:
                raise
            except Exception as caught:  # sizes may depend on each other, packages may be missing, and so on
                error = error if isinstance(error, ImportError) else caught
    raise NoModelError(f"{type(error).__name__}: {error}".strip()) from error


def _classes(model_type: str) -> Iterator[tuple[type, type]]:
    """Configuration and model classes of a type, the one that AutoModel makes first."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        name = config_class.__module__.replace(".configuration_", ".modeling_")
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NoModelError(f"no module {error.name}") from error
    names = MODEL_MAPPING_NAMES.get(model_type, ())
    names = (names,) if isinstance(names, str) else names
    models = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and not kind.__name__.endswith("PreTrainedModel")
    ]
    for kind in sorted(models, key=lambda kind: kind.__name__ not in names):
        if kind.__name__ in names or (kind.__module__ == name and getattr(kind, "config_class", None) is config_class):
            yield config_class, kind


def _build(model_class: type, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > MAX_PARAMETERS:
        raise NoModelError(f"{size / 1e9:.1f} billion parameters however small its configuration")
    return model_class(config).eval()


def _shrunk(config: PreTrainedConfig, widths, unset) -> PreTrainedConfig:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrunk(value, widths, unset)
        elif not name.startswith("_"):
            new = unset.get(name) if value is None else _small(name, value, widths)
            if new != value:
                setattr(config, name, new)
    return config


def _small(name: str, value, widths):
    if isinstance(value, list | tuple) and name in ("depths", "num_blocks", "blocks", "layers"):
        return type(value)(min(item, 1) if isinstance(item, int) else item for item in value)
    if isinstance(value, list) and name in ("layer_types", "mlp_layer_types"):
        return value[:2]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith("token_id") and value >= 100:
        return 1
    for pattern, size in widths:
        if re.search(rf"(^|_)({pattern})$", name):
            return size
    for pattern, size in _COUNTS:
        if re.search(rf"(^|_)({pattern})$", name):
            return min(value, size)
    return value
