"""What must hold for every input: masks, batches, order, time, splits, packing, heads.

`make fuzz` runs the same properties with thousands of cases each (HYPOTHESIS_PROFILE=fuzz).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    length: int
    width: int
    value_width: int
    size: float
    is_causal: bool
    near: int | None
    normalize_keys: bool

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads: int, width: int) -> Tensor:
            shape = (self.batch, heads, self.length, width)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        heads = self.key_heads * self.group
        q, k = draw(heads, self.width) * self.size, draw(self.key_heads, self.width) * self.size
        return q, k, draw(self.key_heads, self.value_width)

    def mask(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.rand(self.batch, self.length, generator=generator) > 0.4

    @property
    def scales(self) -> dict[str, float]:
        return {"alpha": 1.3, "beta": 0.8}

    @property
    def options(self) -> dict:
        return {
            **self.scales,
            "is_causal": self.is_causal,
            "near": self.near,
            "normalize_keys": self.normalize_keys,
        }


cases = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    length=st.one_of(st.integers(1, 20), st.sampled_from([31, 64, 65, 130])),
    width=st.integers(1, 9),
    value_width=st.integers(1, 9),
    size=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    is_causal=st.booleans(),
    near=st.sampled_from([None, 1, 3, 8, 64]),
    normalize_keys=st.booleans(),
)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@given(cases)
def test_masked_content_changes_nothing(case):
    q, k, v = case.tensors()
    mask = case.mask()
    other_k, other_v = k.clone(), v.clone()
    hidden = ~mask[:, None, :, None]
    other_k.masked_fill_(hidden, torch.nan)
    other_v.masked_fill_(hidden, torch.inf)
    leaves = [x.clone().requires_grad_() for x in (q, other_k, other_v)]
    out = lln.attention(*leaves, key_mask=mask, **case.options)
    close(out, lln.attention(q, k, v, key_mask=mask, **case.options))
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient.isfinite().all()


@given(cases)
def test_masking_a_key_equals_removing_it(case):
    q, k, v = case.tensors()
    mask = case.mask()[:1]
    options = {**case.scales, "normalize_keys": case.normalize_keys}
    masked = lln.attention(q[:1], k[:1], v[:1], key_mask=mask, **options)
    removed = lln.attention(q[:1], k[:1, :, mask[0]], v[:1, :, mask[0]], **options)
    close(masked, removed)
    both = {"key_mask": mask, "query_mask": mask}
    measured = lln.attention(q[:1], k[:1], v[:1], **both)[:, :, mask[0]]
    close(measured, lln.attention(*(x[:1, :, mask[0]] for x in (q, k, v))))


@given(cases, st.integers(0, 5))
def test_trailing_padding_equals_truncation(case, padding):
    q, k, v = case.tensors()
    longer = [
        torch.cat([x, torch.randn_like(x[:, :, :1]).expand(-1, -1, padding, -1)], 2)
        for x in (q, k, v)
    ]
    mask = torch.ones(case.batch, case.length + padding, dtype=torch.bool)
    mask[:, case.length :] = False
    padded = lln.attention(*longer, key_mask=mask, **case.options)[:, :, : case.length]
    close(padded, lln.attention(q, k, v, **case.options))


@given(cases)
def test_a_sample_does_not_depend_on_its_batch(case):
    q, k, v = case.tensors()
    mask = case.mask()
    together = lln.attention(q, k, v, key_mask=mask, **case.options)
    measured = lln.attention(q, k, v, key_mask=mask, query_mask=mask)
    for b in range(case.batch):
        one = [x[b : b + 1] for x in (q, k, v)]
        close(together[b : b + 1], lln.attention(*one, key_mask=mask[b : b + 1], **case.options))
        alone = lln.attention(*one, key_mask=mask[b : b + 1], query_mask=mask[b : b + 1])
        close(measured[b : b + 1], alone)


@given(cases)
def test_order_of_keys_does_not_matter_and_queries_keep_theirs(case):
    q, k, v = case.tensors()
    generator = torch.Generator().manual_seed(case.seed)
    queries = torch.randperm(case.length, generator=generator)
    keys = torch.randperm(case.length, generator=generator)
    options = {**case.scales, "normalize_keys": case.normalize_keys}
    out = lln.attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], **options)
    close(out, lln.attention(q, k, v, **options)[:, :, queries])


@given(cases, st.integers(0, 129))
def test_the_future_changes_nothing(case, cut):
    q, k, v = case.tensors()
    cut = min(cut, case.length)
    options = {**case.options, "is_causal": True}
    whole = lln.attention(q, k, v, **options)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, cut:] = 50 * torch.randn_like(x[:, :, cut:])
    close(lln.attention(*changed, **options)[:, :, :cut], whole[:, :, :cut])


@given(cases, st.integers(0, 129))
def test_split_and_merge_is_the_whole(case, cut):
    q, k, v = case.tensors()
    cut, mask = min(cut, case.length), case.mask()
    options = {"beta": 0.8, "normalize_keys": case.normalize_keys}
    parts = [
        lln.summarize(k[:, :, part], v[:, :, part], key_mask=mask[:, part], **options)
        for part in (slice(0, cut), slice(cut, case.length))
    ]
    whole = lln.attention(
        q, k, v, key_mask=mask, alpha=1.3, beta=0.8, normalize_keys=case.normalize_keys
    )
    for state in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        close(lln.read(q, state, alpha=1.3), whole)
    empty = lln.State.empty(*k.shape[:2], k.shape[3], v.shape[3], dtype=torch.float64)
    close(lln.read(q, empty.merge(parts[0]).merge(parts[1]), alpha=1.3), whole)


@given(cases, st.lists(st.integers(0, 70), min_size=1, max_size=5))
def test_packed_equals_padded_equals_one_by_one(case, lengths):
    generator = torch.Generator().manual_seed(case.seed)
    total = sum(lengths)
    heads = case.key_heads * case.group

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(total, heads, width, generator=generator, dtype=torch.float64)

    q, k = draw(heads, case.width) * case.size, draw(case.key_heads, case.width)
    v = draw(case.key_heads, case.value_width)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    measured = {} if case.is_causal else {"near": case.near}
    for options in [case.options] + ([measured] if measured else []):
        packed = lln.attention_varlen(q, k, v, cu, **options)
        longest = max(lengths)
        padded = [q.new_zeros(len(lengths), x.shape[1], longest, x.shape[2]) for x in (q, k, v)]
        mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
        for s, length in enumerate(lengths):
            mask[s, :length] = True
            for target, x in zip(padded, (q, k, v), strict=True):
                target[s, :, :length] = x[cu[s] : cu[s + 1]].transpose(0, 1)
        together = lln.attention(*padded, key_mask=mask, query_mask=mask, **options)
        for s, length in enumerate(lengths):
            mine = packed[cu[s] : cu[s + 1]].transpose(0, 1)
            one = [x[cu[s] : cu[s + 1]].transpose(0, 1)[None] for x in (q, k, v)]
            close(mine, together[s, :, :length])
            close(mine, lln.attention(*one, **options)[0])


@given(cases)
def test_grouped_heads_equal_repeated_heads(case):
    q, k, v = case.tensors()
    repeated = [x.repeat_interleave(case.group, dim=1) for x in (k, v)]
    mask = case.mask()
    grouped = lln.attention(q, k, v, key_mask=mask, **case.options)
    close(grouped, lln.attention(q, *repeated, key_mask=mask, **case.options))


@given(cases)
def test_the_decode_loop_equals_the_causal_op(case):
    q, k, v = (x[:, :, :33] for x in case.tensors())
    mask = case.mask()[:, :33]
    options = {**case.scales, "normalize_keys": case.normalize_keys}
    whole = lln.attention(q, k, v, is_causal=True, key_mask=mask, **options)
    state, steps = None, []
    for t in range(q.shape[2]):
        now = slice(t, t + 1)
        out, state = lln.prefill(
            q[:, :, now], k[:, :, now], v[:, :, now], state, key_mask=mask[:, now], **options
        )
        steps.append(out)
    close(torch.cat(steps, 2), whole)


@given(cases, st.integers(0, 140))
def test_cross_attention_is_the_end_of_self_attention(case, start):
    """Bottom-right alignment: the last queries of a sequence, asked alone, get the same answer."""
    q, k, v = case.tensors()
    start = min(start, case.length)
    whole = lln.attention(q, k, v, **case.options)
    close(lln.attention(q[:, :, start:], k, v, **case.options), whole[:, :, start:])


@given(cases, st.integers(0, 5))
def test_linear_time_is_the_definition(case, more):
    """Outputs and gradients of the eager path against the O(N²) reference, masks included."""
    tensors = [x.requires_grad_() for x in case.tensors()]
    q, k, v = tensors[0][:, :, : max(1, case.length - more)], *tensors[1:]
    found = []
    for impl in ("eager", "reference"):
        out = lln.attention(q, k, v, key_mask=case.mask(), impl=impl, **case.options)
        found.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for got, exact in zip(*found, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-7, atol=1e-8 * max(1.0, case.size))


@given(cases)
def test_rows_are_averages_of_values(case):
    q, k, v = case.tensors()
    ones = lln.attention(q, k, torch.ones_like(v), **case.options)
    close(ones, torch.ones_like(ones))
    out = lln.attention(q, k, v, **case.options)
    assert out.abs().max() <= v.abs().max() * (1 + 1e-9)
