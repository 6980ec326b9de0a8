"""Attention by way of landmarks: a few points of the context, which read it and are read."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lln.baselines.base import Core, Layer
from lln.ops.common.arguments import check_positive_int, no_autocast
from lln.protocols import compute_dtype

BATCHED_ON_CPU = 128  # rows of the largest matrices that a CPU solves in batches


class Read(NamedTuple):
    """What is kept of a context, whatever its length: landmarks, their values, which exist."""

    landmarks: Float[Tensor, "B H m D"]
    values: Float[Tensor, "B H m E"]
    real: Bool[Tensor, "B m"] | None


class Landmarks(Core):
    r"""Softmax attention to m landmarks, which have read the context by softmax attention.

        out = softmax(Q Cᵀ) W,  (softmax(C Cᵀ) + λ I) W = (1 + λ) softmax(C Kᵀ) V,  scores / √d

    C are m of the keys that may be seen, chosen whatever their order, see :func:`spread`. W are
    values such that a query at a landmark finds what softmax attention would give it: without the
    inverse it would find a mean of what this landmark and its neighbours have read. λ keeps that
    well-posed; as it grows, W becomes softmax(C Kᵀ) V, the form of Agent attention (Han et al.
    2023, arXiv:2312.08874). Without λ it would be Nyström's method, which Nyströmformer applies to
    means of neighbouring tokens. In the words of LLN, C are the slots: they lie where the keys do.
    Weights of a row sum to one, and some may be negative. O(N m d + m³) time, O(N d) memory.

    A context is read once and kept in m (D + E) numbers a head, for as many queries as come:

        kept = core.remember(k, v, key_mask)
        out = core.recall(q, kept)              # core(q, k, v, key_mask), in two steps

    Args:
        landmarks: m; a context of fewer keys has one for each.
        ridge: λ > 0.

    Numerics: torch's fused attention keeps its sums in float32, in which W is solved for, too.
    """

    def __init__(self, layer: Layer, *, landmarks: int = 128, ridge: float = 0.03) -> None:
        super().__init__(layer)
        check_positive_int("landmarks", landmarks)
        if not 0 < ridge < float("inf"):
            raise ValueError(f"ridge={ridge!r}: must be above 0 and finite")
        self.landmarks, self.ridge = landmarks, ridge

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        # The sums are inside torch's kernels: nothing has to be widened.
        return self.recall(q, self.remember(k, v, key_mask))

    def remember(
        self,
        k: Float[Tensor, "B H M D"],
        v: Float[Tensor, "B H M E"],
        key_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Read:
        """Read a context; what masked keys hold must be finite, and does not count."""
        landmarks, real = spread(k, key_mask, self.landmarks)
        seen = None if key_mask is None else key_mask | ~key_mask.any(1, keepdim=True)
        values = unblurred(landmarks, attend(landmarks, k, v, seen), real, self.ridge)
        return Read(landmarks, values, real)

    def recall(self, q: Float[Tensor, "B H N D"], kept: Read) -> Float[Tensor, "B H N E"]:
        """What queries find in a context that was read."""
        if kept.real is None:
            return attend(q, kept.landmarks, kept.values, None)
        blind = ~kept.real.any(1, keepdim=True)
        out = attend(q, kept.landmarks, kept.values, kept.real | blind)
        return out.masked_fill(blind[:, None, None], 0)


def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    v: Float[Tensor, "B H M E"],
    seen: Bool[Tensor, "B M"] | None,
) -> Float[Tensor, "B H N E"]:
    mask = None if seen is None else seen[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def unblurred(
    landmarks: Float[Tensor, "B H m D"],
    read: Float[Tensor, "B H m E"],
    real: Bool[Tensor, "B m"] | None,
    ridge: float,
) -> Float[Tensor, "B H m E"]:
    """Values which landmarks that attend to each other find as ``read``, but for ``ridge``.

    softmax(C Cᵀ) is a kernel's matrix with its rows divided by their sums: its eigenvalues lie in
    [0, 1], those of what is solved in [ridge, 1 + ridge].
    """
    with no_autocast(read):
        c, r = (x.to(compute_dtype(x)) for x in (landmarks, read))
        scores = c @ c.mT / c.shape[-1] ** 0.5
        if real is not None:
            seen = real | ~real.any(1, keepdim=True)
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        blur = torch.softmax(scores, dim=-1)
        blur = blur + ridge * torch.eye(blur.shape[-1], dtype=blur.dtype, device=blur.device)
        return _solved(blur, (1 + ridge) * r).to(read.dtype)


def _solved(a: Float[Tensor, "B H m m"], b: Float[Tensor, "B H m E"]) -> Float[Tensor, "B H m E"]:
    """a⁻¹ b without a check for errors, which would wait for the GPU: ridge > 0 leaves none.

    On several threads of a CPU torch hangs in batches of larger matrices (pytorch#142815: from
    about 150 rows on). There they are solved one by one.
    """
    if a.device.type != "cpu" or a.shape[-1] <= BATCHED_ON_CPU or not len(a):
        return torch.linalg.solve_ex(a, b).result
    each = zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)
    return torch.stack([torch.linalg.solve_ex(x, y).result for x, y in each]).view_as(b)


def spread(
    k: Float[Tensor, "B H M D"], key_mask: Bool[Tensor, "B M"] | None, count: int
) -> tuple[Float[Tensor, "B H m D"], Bool[Tensor, "B m"] | None]:
    """``count`` of the keys that may be seen, whatever their order, and which of them exist.

    The l-th of m is the ⌊(l + ½) n / m⌋-th of n keys in the order of the sum of their features; if
    n < m, every key is taken once.
    """
    batch, heads, keys, _ = k.shape
    count = min(count, keys)
    height = k.detach().to(compute_dtype(k)).sum(-1)  # [B, H, M]
    place = torch.arange(count, device=k.device)
    if key_mask is None:
        turn, real = (2 * place + 1) * keys // (2 * count), None
    else:
        total = key_mask.sum(1, keepdim=True)  # [B, 1]
        turn = torch.where(total < count, place, (2 * place + 1) * total // (2 * count))
        real = place < total
        height = height.masked_fill(~key_mask[:, None], torch.inf)
    turn = turn.expand(batch, count)[:, None].expand(-1, heads, -1)
    at = height.argsort(-1).gather(-1, turn)
    return k.gather(2, at[..., None].expand(-1, -1, -1, k.shape[3])), real
