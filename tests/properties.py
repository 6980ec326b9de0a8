"""Cases and bodies of the properties that hold for more than one form of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import lln

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """Random but reproducible inputs; float64, so that equality is tight."""

    seed: int
    batch: int
    key_heads: int
    group: int
    queries: int
    keys: int
    size: float
    normalize_keys: bool

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and a mask of keys."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads: int, tokens: int, width: int) -> Tensor:
            shape = (self.batch, heads, tokens, width)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q = self.size * draw(self.key_heads * self.group, self.queries, 4)
        k, v = self.size * draw(self.key_heads, self.keys, 4), draw(self.key_heads, self.keys, 3)
        return q, k, v, torch.rand(self.batch, self.keys, generator=generator) > 0.3

    @property
    def options(self) -> dict[str, Any]:
        """Of lln.attention."""
        raise NotImplementedError

    def features(self, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """Of queries and keys, where the case has its own."""
        return {}


SIZES = {
    "seed": st.integers(0, 2**31),
    "batch": st.integers(1, 2),
    "key_heads": st.integers(1, 2),
    "group": st.integers(1, 2),
    "queries": st.integers(1, 40),
    "keys": st.integers(1, 40),
    "size": st.sampled_from([0.1, 1.0, 10.0]),
    "normalize_keys": st.booleans(),
}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def check_definition(case: Case) -> None:
    """Output and gradients in linear time are those of the reference."""
    *tensors, mask = case.tensors()
    found = []
    for impl in ("eager", "reference"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        features = case.features(leaves[0], leaves[1])
        out = lln.attention(*leaves, key_mask=mask, **features, **case.options, impl=impl)
        torch.manual_seed(0)
        found.append([out, *torch.autograd.grad(out, leaves, torch.randn_like(out))])
    for one, other in zip(*found, strict=True):
        close(one, other)


def check_masks_and_batches(case: Case) -> None:
    """Masked content and other samples change nothing."""
    q, k, v, mask = case.tensors()
    hidden = ~mask[:, None, :, None]
    dirty = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)
    out = lln.attention(q, k, v, key_mask=mask, **case.options)
    close(lln.attention(q, *dirty, key_mask=mask, **case.options), out)
    alone = lln.attention(q[:1], k[:1], v[:1], key_mask=mask[:1], **case.options)
    close(alone, out[:1])


def check_packed(case: Case, sequences: int) -> None:
    """Packed sequences are those sequences one by one."""
    generator = torch.Generator().manual_seed(case.seed)
    q, k, v, mask = (x[0] for x in case.tensors())
    packed = [x.transpose(0, 1) for x in (q, k, v)]
    cuts = []
    for tokens in (case.queries, case.keys):
        inner = torch.randint(0, tokens + 1, (sequences - 1,), generator=generator)
        cuts.append(torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([tokens])]))
    out = lln.attention_varlen(*packed, *cuts, key_mask=mask, **case.options)
    for s in range(sequences):
        one, other = (slice(int(cut[s]), int(cut[s + 1])) for cut in cuts)
        if one.start == one.stop:
            continue
        alone = lln.attention(
            q[None, :, one], k[None, :, other], v[None, :, other], key_mask=mask[None, other],
            **case.options,
        )  # fmt: skip
        close(out[one], alone[0].transpose(0, 1))
