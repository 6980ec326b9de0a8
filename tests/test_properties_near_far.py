"""What must hold for near and far keys under one normaliser, whatever the windows.

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
from lln.nn import LLNAttention

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
    slots: int | None
    size: float
    is_causal: bool
    block: int
    overlap: int
    sinks: int
    mix: Any
    far: str | None
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
        given = {
            "alpha": 1.3,
            "beta": 0.8,
            "is_causal": self.is_causal,
            "diag_block": self.block,
            "diag_overlap": self.overlap,
            "sinks": self.sinks,
            "mix": self.mix,
            "normalize_keys": self.normalize_keys,
        }
        return given | ({"gamma": -0.7, "far": self.far} if self.mix == "joint" else {})

    def features(self, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        if self.slots is None:
            return {}
        generator = torch.Generator().manual_seed(self.seed + 1)
        maps = torch.randn(4, self.slots, generator=generator, dtype=torch.float64)
        return {"q_features": q @ maps, "k_features": k @ maps}


cases = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    slots=st.sampled_from([None, 1, 7]),
    size=st.sampled_from([0.1, 1.0, 10.0]),
    is_causal=st.booleans(),
    block=st.sampled_from([1, 3, 8, 64]),
    overlap=st.sampled_from([0, 1, 5, 20]),
    sinks=st.sampled_from([0, 1, 4]),
    mix=st.sampled_from(["joint", "joint", "average", 0.3]),
    far=st.sampled_from(["others", "all"]),
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
        features = case.features(leaves[0], leaves[1])
        out = lln.attention(*leaves, key_mask=mask, **features, **case.options, impl=impl)
        torch.manual_seed(0)
        found.append([out, *torch.autograd.grad(out, leaves, torch.randn_like(out))])
    for one, other in zip(*found, strict=True):
        close(one, other)


@given(cases)
def test_masked_content_and_other_samples_change_nothing(case):
    q, k, v, mask = case.tensors()
    hidden = ~mask[:, None, :, None]
    dirty = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)
    out = lln.attention(q, k, v, key_mask=mask, **case.options)
    close(lln.attention(q, *dirty, key_mask=mask, **case.options), out)
    alone = lln.attention(q[:1], k[:1], v[:1], key_mask=mask[:1], **case.options)
    close(alone, out[:1])


@given(cases)
def test_the_future_changes_nothing(case):
    q, k, v, mask = case.tensors()
    options = {**case.options, "is_causal": True}
    cut = min(case.queries, case.keys) // 2
    later = slice(case.keys - cut, None)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, :, later], other_v[:, :, later] = -3.0, 5.0
    seen = case.queries - cut
    out = lln.attention(q, k, v, key_mask=mask, **options)[:, :, :seen]
    close(lln.attention(q, other_k, other_v, key_mask=mask, **options)[:, :, :seen], out)


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


@given(cases)
def test_measured_levels_are_finite_and_their_rows_sum_to_one(case):
    q, k, _, mask = case.tensors()
    core = LLNAttention(
        case.key_heads * case.group, 4, num_kv_heads=case.key_heads, diag_block=case.block,
        diag_overlap=case.overlap, sinks=case.sinks, mix="joint", far=case.far, method="entropy",
    ).double()  # fmt: skip
    rows = core.attention_matrix(q, k, mask).sum(-1)
    assert ((rows - 1).abs().minimum(rows.abs()) < 1e-9).all()
