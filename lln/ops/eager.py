"""Linear-time plain PyTorch: the CPU path, and the fallback everywhere.

Same op names as :mod:`lln.ops`. ``wide`` asks for the compute dtype instead of that of q, so that
LLN+Diag rounds once, not three times.
"""

from __future__ import annotations

from lln.ops.causal.eager_causal import causal
from lln.ops.linear.eager_state import bidirectional, merge, read, summarize
from lln.ops.linear.eager_varlen import varlen
from lln.ops.window.eager_far import block_causal
from lln.ops.window.eager_lln_diag import block_diagonal, lln_diag
from lln.ops.window.eager_near_far import near, near_far
from lln.protocols import Call

__all__ = [
    "bidirectional",
    "block_causal",
    "block_diagonal",
    "causal",
    "lln_diag",
    "merge",
    "near",
    "near_far",
    "read",
    "refuses",
    "summarize",
    "varlen",
]


def refuses(call: Call) -> str | None:
    """None: plain PyTorch takes everything."""
    return None
