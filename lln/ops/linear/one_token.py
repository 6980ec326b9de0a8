"""One more key for a state in place, and one query of it: a step of decoding in plain PyTorch.

Shapes and addresses stay, and nothing is asked of the host: CUDA and ONNX graphs can hold a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.features import finite_or_zero


def fold_(
    log_mass: Float[Tensor, "B Hkv S"],
    mean: Float[Tensor, "B Hkv S E"],
    k: Float[Tensor, "B Hkv 1 S"],
    v: Float[Tensor, "B Hkv 1 E"],
    beta: Float[Tensor, " Hkv"],
    wanted: Bool[Tensor, " B"] | None,
) -> None:
    """Add one key and value of every sample to its state, or of those that are wanted."""
    weight = (beta[:, None] * k[:, :, 0]).to(mean.dtype)
    after = torch.logaddexp(log_mass, weight)
    share = torch.exp(weight - after)[..., None]
    if wanted is not None:
        after = torch.where(wanted[:, None, None], after, log_mass)
        share = share.masked_fill(~wanted[:, None, None, None], 0)
    mean.lerp_(v.to(mean.dtype).expand_as(mean), share.expand_as(mean))
    log_mass.copy_(after)


def read_with_log(
    q: Float[Tensor, "B H 1 S"],
    alpha: Float[Tensor, " H"],
    log_mass: Float[Tensor, "B Hkv S"],
    mean: Float[Tensor, "B Hkv S E"],
    *,
    maybe_none: bool,
) -> tuple[Float[Tensor, "B H 1 E"], Float[Tensor, "B H 1"]]:
    """What the queries get from the state, and the logarithm of its sum; 0, −inf for no key."""
    rows = (alpha[:, None, None] * q).to(mean.dtype)
    rows = rows.unflatten(1, (mean.shape[1], -1)).flatten(3)  # [B, Hkv, G, S]
    return weighted(rows + log_mass[:, :, None], [mean], maybe_none=maybe_none)


def weighted(
    scores: Float[Tensor, "B Hkv G W"], values: Sequence[Tensor], *, maybe_none: bool
) -> tuple[Float[Tensor, "B H 1 E"], Float[Tensor, "B H 1"]]:
    """The mean of values by the exponentials of scores, and the logarithm of their sum.

    Args:
        scores: −inf for keys that are not seen.
        values: ``[B, Hkv, w, E]``, in tensors of W rows together.
        maybe_none: Whether a row may see none; it gets 0 and −inf.
    """
    top = scores.amax(-1, keepdim=True)
    top = finite_or_zero(top) if maybe_none else top
    weights = torch.exp(scores - top)
    mass = weights.sum(-1, keepdim=True)
    shares = weights.split([x.shape[2] for x in values], -1) if len(values) > 1 else [weights]
    outputs = [share @ x for share, x in zip(shares, values, strict=True)]
    total = sum(outputs[1:], outputs[0])
    out = total / (mass.masked_fill(mass == 0, 1) if maybe_none else mass)
    return _heads(out), _heads(top + mass.log())[..., 0]


def _heads(x: Float[Tensor, "B Hkv G E"]) -> Float[Tensor, "B H 1 E"]:
    return x.flatten(1, 2)[:, :, None]
