"""The transformers backend: any causal model of transformers, on what torch runs on."""

from foretell.backends.transformers._load import load
from foretell.backends.transformers._model import InexactArithmeticWarning, TransformersModel

__all__ = ["InexactArithmeticWarning", "TransformersModel", "load"]
