"""Models with our attention as ONNX graphs: any batch and length, memory linear in it."""

try:
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "lln.onnx needs onnx and onnxscript; install them with: pip install 'lln-attention[onnx]'"
    ) from error

from lln.onnx.decoding import DecodingStep
from lln.onnx.export import export, translations

__all__ = ["DecodingStep", "export", "translations"]
