"""What must hold for causal attention across blocks, whatever the blocks.

`make fuzz` runs the same properties with thousands of cases each (HYPOTHESIS_PROFILE=fuzz).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
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
    diag_block: int | None
    multiple: int
    mix: Any
    normalize_keys: bool

    @property
    def block(self) -> int:
        return (self.diag_block or 1) * self.multiple

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
    def linear(self) -> dict[str, Any]:
        return {"alpha": 1.3, "beta": 0.8, "normalize_keys": self.normalize_keys}

    @property
    def options(self) -> dict[str, Any]:
        given = {**self.linear, "is_causal": True, "causal_block": self.block}
        if self.diag_block is not None:
            given |= {"diag_block": self.diag_block, "mix": self.mix}
        return given


cases = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    size=st.sampled_from([0.1, 1.0, 10.0]),
    diag_block=st.sampled_from([None, 2, 3, 8]),
    multiple=st.sampled_from([1, 2, 3, 64]),
    mix=st.sampled_from(["average", 0.3]),
    normalize_keys=st.booleans(),
)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@given(cases)
def test_linear_time_is_the_definition(case):
    *tensors, mask = case.tensors()
    found = []
    for impl in ("eager", "reference"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = lln.attention(*leaves, key_mask=mask, **case.options, impl=impl)
        torch.manual_seed(0)
        found.append([out, *torch.autograd.grad(out, leaves, torch.randn_like(out))])
    for one, other in zip(*found, strict=True):
        close(one, other)


@given(cases)
def test_each_block_is_bidirectional_attention_over_the_keys_up_to_its_end(case):
    q, k, v, mask = case.tensors()
    options = {**case.options, "diag_block": None, "mix": "average"}
    out = lln.attention(q, k, v, key_mask=mask, **options)
    position = torch.arange(case.queries) + case.keys - case.queries
    for block in position.div(case.block, rounding_mode="floor").unique().tolist():
        rows = position.div(case.block, rounding_mode="floor") == block
        end = min(max((block + 1) * case.block, 0), case.keys)
        part = k[:, :, :end], v[:, :, :end]
        close(
            out[:, :, rows],
            lln.attention(q[:, :, rows], *part, key_mask=mask[:, :end], **case.linear),
        )


@given(cases)
def test_masked_content_and_other_samples_change_nothing(case):
    q, k, v, mask = case.tensors()
    hidden = ~mask[:, None, :, None]
    dirty = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)
    out = lln.attention(q, k, v, key_mask=mask, **case.options)
    close(lln.attention(q, *dirty, key_mask=mask, **case.options), out)
    alone = lln.attention(q[:1], k[:1], v[:1], key_mask=mask[:1], **case.options)
    close(alone, out[:1])


@given(cases, st.integers(0, 5))
def test_later_blocks_change_nothing(case, first):
    q, k, v, mask = case.tensors()
    later = slice(min(first * case.block, case.keys), None)
    others = [x.clone() for x in (q, k, v)]
    seen = min(max(first * case.block - case.keys + case.queries, 0), case.queries)
    for x, part in zip(others, (slice(seen, None), later, later), strict=True):
        x[:, :, part] = 7.0
    out = lln.attention(q, k, v, key_mask=mask, **case.options)[:, :, :seen]
    close(lln.attention(*others, key_mask=mask, **case.options)[:, :, :seen], out)


@given(cases, st.integers(1, 3))
def test_packed_is_one_by_one(case, sequences):
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


@given(cases, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_stream_in_whole_blocks_is_the_stream(case, pieces):
    block = case.block % 8 + 1
    total = sum(pieces) * block
    q, k, v, mask = Case(**{**vars(case), "queries": total, "keys": total}).tensors()
    state, found, start = None, [], 0
    for size in pieces:
        part = slice(start, start + size * block)
        tokens = (x[:, :, part] for x in (q, k, v))
        out, state = lln.prefill(
            *tokens, state, causal_block=block, key_mask=mask[:, part], **case.linear
        )
        found.append(out)
        start = part.stop
    options = {**case.linear, "is_causal": True, "causal_block": block}
    close(torch.cat(found, 2), lln.attention(q, k, v, key_mask=mask, **options))
