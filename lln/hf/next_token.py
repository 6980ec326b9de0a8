"""One more token of every sample from an open window and its state, in a few operations.

The answer is that of :meth:`OpenWindow.attend` and :meth:`OpenWindow.append`, which take any number
of tokens. Here the window is written in place, and where no sample is padded all of them stand at
the same place of it, so that slices do instead of masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.hf.open_window import OpenWindow
from lln.hf.rotation import Rotation
from lln.nn import LLNAttention
from lln.ops.common.features import finite_or_zero
from lln.ops.linear.state import State
from lln.ops.window.eager_near_far import NOWHERE
from lln.ops.window.local import Local
from lln.protocols import compute_dtype

Part = tuple[Tensor, Tensor, Tensor | None]


def serves(core: LLNAttention, window: OpenWindow | None) -> bool:
    """Whether a core decodes from such a window at all, and may write into this one."""
    local = core.local
    if window is None or local is None or not local.joint or core.conv:
        return False
    writable = torch.is_inference_mode_enabled() or not window.k.is_inference()
    return writable and not torch.is_grad_enabled()


def counts_of(window: OpenWindow, tokens: int, *, padded: bool) -> list[int] | None:
    """Positions of each sample since its first real token; None if some has a sink to come.

    Without padding that are ``tokens``; otherwise the window is asked, for which a GPU has to wait.
    """
    sinks = window.sink_k.shape[2]
    if not padded:
        return [tokens] * len(window.k) if tokens >= max(sinks, 1) else None
    counts = window.count.tolist()
    return None if min(counts) == 0 or bool((window.sink_position == NOWHERE).any()) else counts


def attend_next(
    core: LLNAttention,
    window: OpenWindow,
    state: State,
    counts: Sequence[int],
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B Hkv 1 D"],
    v: Float[Tensor, "B Hkv 1 E"],
    key_mask: Bool[Tensor, "B 1"] | None,
    rotation: Rotation | None,
) -> tuple[Float[Tensor, "B H 1 E"], bool]:
    """Near keys and far ones under one normaliser, and whether the window has read the token.

    It has not where the token ends the block of a sample, whose keys must leave the window.

    Args:
        counts: As :func:`counts_of` gives them.
        key_mask: None where no sample is padded.
    """
    local = core.local
    assert local is not None
    wide = compute_dtype(q, k, v)
    queries = q.to(wide)
    alpha, beta = (x.to(wide).expand(len(q), -1) for x in core.scales())
    keys, q_far, k_far = core.decoding_inputs(queries, k.to(wide), beta, rotation)
    rows = (alpha[..., None, None] * q_far).unflatten(1, (k.shape[1], -1)).flatten(3)
    if key_mask is None:
        near = _near_together(window, queries, keys, v, k_far, local, counts[0])
        linear = _read(rows, state) if _has_far(local, counts[0]) else None
    else:
        near = _near_apart(window, queries, keys, v, k_far, key_mask, local)
        linear = _read(rows, state)
    out, log = near
    if linear is not None:
        share = torch.sigmoid(log - linear[1] - _level(core, log))
        out = torch.lerp(linear[0], out, share[..., None])
    if any((count + 1) % local.block == 0 for count in counts):
        return _heads(out, q), False
    if key_mask is None:
        window.valid[:, local.overlap + counts[0] % local.block] = True
    window.count.add_(1)
    return _heads(out, q), True


def _near_together(
    window: OpenWindow, q: Tensor, k: Tensor, v: Tensor, k_far: Tensor, local: Local, count: int
) -> tuple[Float[Tensor, "B Hkv G E"], Float[Tensor, "B Hkv G"]]:
    """Softmax over the window where every sample has ``count`` tokens; output and logarithm."""
    place = local.overlap + count % local.block
    start = count // local.block * local.block - local.overlap  # position of the window
    for buffer, new in ((window.k, k), (window.v, v), (window.k_far, k_far)):
        buffer[:, :, place] = new[:, :, 0].to(buffer.dtype)
    keys, values = (x[:, :, max(0, -start) : place + 1] for x in (window.k, window.v))
    parts: list[Part] = [(keys, values, None)]
    outside = min(local.sinks, max(0, start))
    if outside:
        parts.append((window.sink_k[:, :, :outside], window.sink_v[:, :, :outside], None))
    return softmax_over(q, parts, local.scale)


def _near_apart(
    window: OpenWindow,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_far: Tensor,
    key_mask: Bool[Tensor, "B 1"],
    local: Local,
) -> tuple[Float[Tensor, "B Hkv G E"], Float[Tensor, "B Hkv G"]]:
    """Softmax over the window where samples stand at different places, some keys masked."""
    place = (local.overlap + window.count % local.block)[:, None]
    for buffer, new in ((window.k, k), (window.v, v), (window.k_far, k_far)):
        index = place[:, None, :, None].expand(-1, buffer.shape[1], 1, buffer.shape[3])
        buffer.scatter_(2, index, new.to(buffer.dtype))
    window.valid.scatter_(1, place, key_mask)
    parts: list[Part] = [(window.k, window.v, window.valid)]
    if local.sinks:
        start = (window.count // local.block * local.block - local.overlap)[:, None]
        parts.append((window.sink_k, window.sink_v, window.sink_position < start))
    return softmax_over(q, parts, local.scale)


def softmax_over(
    q: Float[Tensor, "B H 1 D"], parts: Sequence[Part], scale: float
) -> tuple[Float[Tensor, "B Hkv G E"], Float[Tensor, "B Hkv G"]]:
    """Softmax of one query over keys in several tensors, which are not copied into one.

    Args:
        parts: Keys ``[B, Hkv, W, D]``, values, and which may be attended, ``[B, W]``; None is all.

    Returns:
        The output and the logarithm of its normaliser; 0 and −inf for no key.
    """
    rows = scale * q.unflatten(1, (parts[0][0].shape[1], -1)).flatten(3)  # [B, Hkv, G, D]
    scores = []
    for keys, _, seen in parts:
        found = rows @ keys.to(q.dtype).mT
        hidden = None if seen is None else ~seen[:, None, None]
        scores.append(found if hidden is None else found.masked_fill(hidden, -torch.inf))
    together = torch.cat(scores, -1) if len(scores) > 1 else scores[0]
    log = torch.logsumexp(together, -1)
    weights = torch.exp(together - finite_or_zero(log)[..., None])
    shares = weights.split([found.shape[-1] for found in scores], -1)
    outputs = [x @ values.to(q.dtype) for x, (_, values, _) in zip(shares, parts, strict=True)]
    return sum(outputs[1:], outputs[0]), log


def _has_far(local: Local, count: int) -> bool:
    """Whether some of ``count`` tokens without padding have left the window and are no sinks."""
    return count // local.block * local.block - local.overlap > local.sinks


def _read(
    rows: Float[Tensor, "B Hkv G S"], state: State
) -> tuple[Float[Tensor, "B Hkv G E"], Float[Tensor, "B Hkv G"]]:
    """What queries get from a state, and the logarithm of its normaliser; 0 and −inf if empty."""
    scores = rows + state.log_mass[:, :, None]
    log = torch.logsumexp(scores, -1)
    return torch.exp(scores - finite_or_zero(log)[..., None]) @ state.mean, log


def _level(core: LLNAttention, like: Float[Tensor, "B Hkv G"]) -> Tensor:
    return core.stored_level().to(like).view(1, *like.shape[1:])


def _heads(out: Float[Tensor, "B Hkv G E"], q: Tensor) -> Float[Tensor, "B H 1 E"]:
    return out.flatten(1, 2)[:, :, None].to(q.dtype)
