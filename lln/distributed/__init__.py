"""Sequence parallelism: every process holds a slice of the sequence, and only states travel.

A slice is summarised by its :class:`lln.State`, D·(E + 1) numbers per head. Processes exchange
these once in the forward pass and their gradients once in the backward pass: the traffic does not
depend on the length of the sequence. Blocks of the diagonal branch never cross a slice;
of windows that do, the keys at the edges travel, too.
"""

from lln.distributed.heads import HeadParallel
from lln.distributed.sliced import attention

__all__ = ["HeadParallel", "attention"]
