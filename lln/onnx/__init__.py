"""Models with our attention as ONNX graphs: any batch and length, memory linear in it."""

from typing import TYPE_CHECKING

try:
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "lln.onnx needs onnx and onnxscript; install them with: pip install 'lln-attention[onnx]'"
    ) from error

from lln.onnx.decoding import DecodingStep
from lln.onnx.export import export, translations

if TYPE_CHECKING:
    from lln.onnx.decoders import DecoderStep, export_decoder
    from lln.onnx.models import TextModel, export_model

__all__ = [
    "DecoderStep",
    "DecodingStep",
    "TextModel",
    "export",
    "export_decoder",
    "export_model",
    "translations",
]


def __getattr__(name: str) -> object:
    """Whole models need transformers, which modules alone do not."""
    if name in ("DecoderStep", "export_decoder"):
        from lln.onnx import decoders

        return getattr(decoders, name)
    if name in ("TextModel", "export_model"):
        from lln.onnx import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
