"""LLN and the zoo in Hugging Face models: register, replace, calibrate, transfer, load, serve."""

try:
    import transformers  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "lln.hf needs transformers; install it with: pip install 'lln-attention[hf]'"
    ) from error

from lln.hf.cache import StateLayer
from lln.hf.calibrate import calibrate
from lln.hf.conversion.cache_size import CacheShare
from lln.hf.conversion.convert import Conversion, convert
from lln.hf.conversion.recover import recover
from lln.hf.conversion.transfer import transfer
from lln.hf.register import register
from lln.hf.replace import Replacement, replace
from lln.hf.saving import load
from lln.hf.sentences import load_sentence_transformer
from lln.hf.serving.engine import Engine
from lln.hf.serving.stream import Stream

__all__ = [
    "CacheShare",
    "Conversion",
    "Engine",
    "Replacement",
    "StateLayer",
    "Stream",
    "calibrate",
    "convert",
    "load",
    "load_sentence_transformer",
    "recover",
    "register",
    "replace",
    "transfer",
]
