"""Kinds of models, and of reasons why a model cannot be built."""

import re

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ALL = ("decoder", "encoder", "vision", "audio", "multimodal")


def of(model_type: str, model: PreTrainedModel) -> str:
    """A model's kind of input, and for text whether it generates text (encoder-decoders count as encoders)."""
    parts = [name for name, value in vars(model.config).items() if isinstance(value, PreTrainedConfig)]
    if len(parts) > 1 and not {"encoder", "decoder"} >= set(parts):
        return "multimodal"
    name = model.main_input_name
    if name in ("pixel_values", "pixel_values_videos", "flattened_patches") or "vision" in model_type:
        return "vision"
    if name in ("input_features", "input_values", "audio_values") or "audio" in model_type:
        return "audio"
    return "decoder" if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "text" in model_type else "encoder"


def reason(message: str) -> str:
    """An error message without the parts that differ between models."""
    missing = re.search(r"requires the (\w+) library|no module (torchaudio)", message)
    if missing:
        return f"needs the package {missing[1] or missing[2]}"
    if message.startswith("no module"):
        return "has no model of its own"
    if message.startswith("NoModelError: "):
        return message.removeprefix("NoModelError: ")
    return message if message.startswith("not done") else "its default configuration makes no model"
