"""Modules: a core on ``[B, H, N, D]`` and a drop-in for ``torch.nn.MultiheadAttention``."""

from lln.nn.attention import RECOMMENDED, LLNAttention
from lln.nn.multihead import LLNMultiheadAttention

__all__ = ["RECOMMENDED", "LLNAttention", "LLNMultiheadAttention"]
