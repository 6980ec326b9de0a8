"""Modules: a core on ``[B, H, N, D]`` and a drop-in for ``torch.nn.MultiheadAttention``."""

from lln.nn.attention import LLNAttention
from lln.nn.multihead import LLNMultiheadAttention

__all__ = ["LLNAttention", "LLNMultiheadAttention"]
