"""Modules: a core on ``[B, H, N, D]`` and a drop-in for ``torch.nn.MultiheadAttention``."""

from lln.nn.attention import LLNAttention
from lln.nn.multihead import LLNMultiheadAttention
from lln.nn.presets import RECOMMENDED, preset_of, recommended

__all__ = ["RECOMMENDED", "LLNAttention", "LLNMultiheadAttention", "preset_of", "recommended"]
