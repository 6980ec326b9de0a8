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

__all__ = ["DecoderStep", "DecodingStep", "export", "export_decoder", "translations"]


def __getattr__(name: str) -> object:
    """Whole decoders need transformers, which modules alone do not."""
    if name in ("DecoderStep", "export_decoder"):
        from lln.onnx import decoders

        return getattr(decoders, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
