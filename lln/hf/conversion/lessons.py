"""What a replaced layer learns from softmax in its place: the comparison of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.hf.conversion.stage import widen
from lln.hf.softmax import SoftmaxCall, softmax_heads_of
from lln.moments.rows import spaced_rows, take_rows
from lln.nn import LLNAttention
from lln.nn.rows import row_weights
from lln.ops.common.arguments import no_autocast
from lln.ops.window.fields import fields_of_rows
from lln.ops.window.near import Near

# A head that answers nearly the same everywhere (all its weight is on one token) has no variance.
LEAST_VARIANCE = 0.05  # of the mean over the heads of its layer


@dataclass
class Lesson:
    """Compares a layer's answers with those of softmax and adds up the gradients of its core.

    Attributes:
        rows: Queries of each sample that are compared; 0 for all, without ``weights``.
        weights: Factor of the divergence of the attention weights, KL(softmax ‖ core).
        learn: Whether gradients are computed.
        errors: ‖core_h − softmax_h‖² / ‖softmax‖² of every call, a number per head; they add up to
            the error of the layer.
    """

    rows: int = 0
    weights: float = 0.0
    learn: bool = True
    generator: torch.Generator | None = None
    errors: list[Tensor] = field(default_factory=list)

    def answer(
        self, core: object, answer: Callable[..., Tensor], call: SoftmaxCall
    ) -> Float[Tensor, "B H N E"]:
        """What the layer says, softmax; ``answer(q, k, v)`` of the core is compared with it."""
        with torch.set_grad_enabled(self.learn), no_autocast(call.q):
            if self.rows and isinstance(core, LLNAttention) and core.conv_weight is None:
                error, loss = self._of_rows(core, call)
            else:
                inputs = [x.detach() for x in (call.q, call.k, call.v)]
                given = answer(*(map(widen, inputs) if self.learn else inputs))
                error = relative_error(given, call.wanted, call.query_mask)
                loss = error.sum()
            if self.learn:
                loss.backward()
        self.errors.append(error.detach())
        return call.wanted

    def _of_rows(self, core: LLNAttention, call: SoftmaxCall) -> tuple[Tensor, Tensor]:
        """The error at chosen rows, and the loss: error per head beside its variance, and KL."""
        heads = softmax_heads_of(core)
        q, k, v = (x.detach().float() for x in (call.q, call.k, call.v))
        masks = {"key_mask": call.key_mask, "query_mask": call.query_mask}
        index = spaced_rows(q.shape[2], self.rows, call.query_mask, q.device, self.generator)
        options = {"is_causal": call.is_causal, "unrotate": call.rotation, "dropout": 0.0}
        draw = core.draw(q, k, **masks, **options)
        p = row_weights(core, q, k, index, draw)
        goal = softmax_rows(q, k, index, call) if self.weights or heads else None
        if heads and goal is not None:  # they answer with softmax, and have nothing to learn
            kept = torch.tensor([head in heads for head in range(q.shape[1])], device=q.device)
            p = torch.where(kept[:, None, None], goal, p)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        given, wanted = p @ v, take_rows(call.wanted.detach().float(), index)
        error = relative_error(given, wanted, None)
        variance = wanted.var(dim=(0, 2), correction=0).sum(-1)
        variance = variance.clamp(min=LEAST_VARIANCE * variance.mean())
        loss = ((given - wanted).square().sum(-1).mean(dim=(0, 2)) / variance).mean()
        if self.weights and goal is not None:
            loss = loss + self.weights * divergence(p, goal)
        return error, loss


def relative_error(
    given: Float[Tensor, "B H N E"],
    wanted: Float[Tensor, "B H N E"],
    query_mask: Bool[Tensor, "B N"] | None,
) -> Float[Tensor, " H"]:
    """‖given_h − wanted_h‖² / ‖wanted‖² of every head at real queries; they add up to the whole."""
    given, wanted = given.float(), wanted.detach().float()
    if query_mask is not None:
        real = query_mask[:, None, :, None]
        given, wanted = given * real, wanted * real
    return (given - wanted).square().sum((0, 2, 3)) / wanted.square().sum().clamp(min=1e-12)


@torch.no_grad()
def softmax_rows(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    index: Int[Tensor, "#B r"],
    call: SoftmaxCall,
) -> Float[Tensor, "B H r M"]:
    """Rows of softmax's matrix."""
    sizes = q.shape[2], k.shape[2]
    near, far = fields_of_rows(index, *sizes, Near(1), call.key_mask, call.is_causal)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = call.scale * take_rows(q, index) @ k.transpose(-1, -2)
    return torch.softmax(scores.masked_fill(~(near | far), -torch.inf), dim=-1)


def divergence(p: Float[Tensor, "B H r M"], wanted: Float[Tensor, "B H r M"]) -> Tensor:
    """KL(wanted ‖ p) in nats, the mean over rows."""
    least = torch.finfo(p.dtype).tiny
    terms = wanted * (wanted.clamp(min=least).log() - p.clamp(min=least).log())
    return terms.sum(-1).mean()
