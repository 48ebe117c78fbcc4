"""The transformers backend: any causal model of transformers, on what torch runs on."""

from foretell.backends.transformers._load import check_device, load, read_text
from foretell.backends.transformers._model import InexactArithmeticWarning, TransformersModel

__all__ = ["InexactArithmeticWarning", "TransformersModel", "check_device", "load", "read_text"]
