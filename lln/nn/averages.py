"""Averages over training batches that survive a forward pass being run a second time.

Activation checkpointing runs a forward pass again inside the backward pass. That run must scale
with the variances of the first one, and must not count the batch twice. Only the moment itself
tells the two apart, and compiled code does not ask: it runs again as it is, or its backward graph
computes from the buffers as the first run *left* them. So all of this is one operator, which looks
when it runs: compilers and the modes of selective checkpointing see the same call both times.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: Forward passes of one module that may wait for their backward pass at the same time.
REMEMBERED_RUNS = 32
#: The least weight of a new batch: a plain mean over ten batches, an exponential average after it.
MOMENTUM = 0.1


def follow(
    batch: Float[Tensor, "R Hkv"],
    variances: Float[Tensor, "R Hkv"],
    batches: Int[Tensor, ""],
    runs: Float[Tensor, "T 2 R Hkv"],
    is_causal: bool,
) -> Float[Tensor, "R Hkv"]:
    """The variances that scale this run; in its first run the averages move towards the batch.

    Args:
        batch: What this batch measures.
        variances, batches, runs: The averages, how many batches they hold, and what the latest
            causal runs measured and used; all three are changed in place.
        is_causal: Take the averages as they were before this batch; otherwise the batch itself.
    """
    return torch.ops.lln.running_variances(batch, variances, batches, runs, is_causal)


@torch.no_grad()
def _follow(
    batch: Tensor,
    variances: Tensor,
    batches: Tensor,
    runs: Tensor,
    is_causal: bool,
) -> Tensor:
    again = _inside_backward()
    if not is_causal:
        source = torch.where(batch.isfinite(), batch, variances)
    elif again:
        source = _used_by(batch, runs)
    else:
        source = variances.clone()
        runs.copy_(torch.cat([torch.stack([batch.to(source), source])[None], runs[:-1]]))
    if not again:
        _move(batch, variances, batches)
    return source


def _inside_backward() -> bool:
    """Whether this is a second run, by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _used_by(batch: Tensor, runs: Tensor) -> Tensor:
    """What the run that measured the same used: the nearest, as rounding may differ."""
    distance = (runs[:, 0] - batch).abs().sum((1, 2)).nan_to_num(nan=torch.inf)
    return runs[distance.argmin(keepdim=True), 1][0]


def _move(batch: Tensor, variances: Tensor, batches: Tensor) -> None:
    usable = batch.isfinite().all()
    batches.add_(usable)
    share = (1 / batches.clamp(min=1)).clamp(min=MOMENTUM)
    step = torch.where(usable, batch - variances, 0)
    variances.add_(step * share)


def _shapes(
    batch: Tensor,
    variances: Tensor,
    batches: Tensor,
    runs: Tensor,
    is_causal: bool,
) -> Tensor:
    dtype = variances.dtype if is_causal else torch.promote_types(batch.dtype, variances.dtype)
    return torch.empty_like(variances, dtype=dtype)


_LIBRARY = torch.library.Library("lln", "FRAGMENT")
# Not to be recorded: a CUDA graph would replay the first run in place of the second.
_TAGS = ("pt2_compliant_tag", "cudagraph_unsafe")  # the latter is unknown to early versions
# `runs` changes too, which is kept from the compiler on purpose: it may give the backward graph a
# copy of what it sees change, and a copy from before the first run does not know that run.
_LIBRARY.define(
    "running_variances(Tensor batch, Tensor(a!) variances, Tensor(b!) batches, Tensor runs, "
    "bool is_causal) -> Tensor",
    tags=[getattr(torch.Tag, tag) for tag in _TAGS if hasattr(torch.Tag, tag)],
)
_LIBRARY.impl("running_variances", _follow, "CompositeExplicitAutograd")
torch.library.register_fake("lln::running_variances", _shapes, lib=_LIBRARY)
