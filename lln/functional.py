"""LLN attention as a function: argument checks, statistics, choice of op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.moments.calibration import measure_packed_scales, measure_scales
from lln.moments.levels import match_level
from lln.ops import triton
from lln.ops.causal.causal import causal
from lln.ops.common.arguments import (
    as_level,
    as_scale,
    autocast,
    check_mask,
    check_pair,
    check_qkv,
    explain_sdpa_arguments,
    is_dtensor,
    read_features,
)
from lln.ops.dispatch import choose, name_of
from lln.ops.linear.bidirectional import bidirectional
from lln.ops.linear.eager_varlen import in_groups
from lln.ops.linear.normalized_keys import normalized_keys
from lln.ops.linear.state import State
from lln.ops.linear.summarize import read, summarize
from lln.ops.linear.varlen import check_packed, check_packed_qkv, varlen
from lln.ops.window.lln_diag import lln_diag
from lln.ops.window.near import Near, check_level, read_causal_block, read_mix, read_near
from lln.ops.window.near_far import near_far
from lln.protocols import Call

if TYPE_CHECKING:
    from lln.moments import MomentFit

    Method = str | MomentFit

P = ParamSpec("P")


def _on_shards(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let a function of q, k and v have DTensors."""

    @functools.wraps(function)
    def sharded(*args: P.args, **options: P.kwargs) -> Tensor:
        if any(is_dtensor(x) for x in args) or any(is_dtensor(x) for x in options.values()):
            from lln.distributed import sharded

            return sharded.attention(function, *args, **options)  # type: ignore[call-arg]
        return function(*args, **options)

    return sharded


@explain_sdpa_arguments
@_on_shards
def attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    causal_block: int | None = None,
    near: int | Near | None = None,
    mix: str | float | Tensor = "average",
    gamma: float | Tensor | None = None,
    features: tuple[Float[Tensor, "B H N S"], Float[Tensor, "B Hkv M S"]] | None = None,
    method: Method = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    r"""Linear Log-Normal attention in O((N + M) D E) time; called like SDPA.

    Eq. (8) of arXiv:2311.13541, with phi_q(x) = exp(alpha x), phi_k(x) = exp(beta x) elementwise:
        out_i = sum_j phi_q(q_i)·phi_k(k_j) v_j / sum_j phi_q(q_i)·phi_k(k_j)

    Args:
        q: Queries ``[B, H, N, D]``: batch, heads, tokens, head size; any floating dtype. q, k and v
            may be DTensors that are split alike over batch, heads or tokens; so is the output.
        k: Keys ``[B, Hkv, M, D]``: H is a multiple of Hkv, and M may differ from N.
        v: Values ``[B, Hkv, M, E]``: E may differ from D.
        alpha, beta: Numbers, ``[H]`` / ``[Hkv]`` or ``[B, H]`` / ``[B, Hkv]``; both or neither.
            Gradients flow to tensors. Left out, they are measured from q and k per sample and head
            and matched by ``method``, as constants of the backward pass. They then depend on all
            queries: in the cross-attention of a decoder the later ones leak into the earlier, so
            give both there, as with ``is_causal``.
        key_mask: True = may be attended. Masking a key equals leaving it out.
        query_mask: True = a real query. Only used to measure the queries' statistics: outputs of
            masked queries are computed all the same.
        is_causal: Query i sees keys j <= i + M − N. alpha and beta are then required.
        causal_block: With ``is_causal``, full attention inside blocks of K positions and causal
            attention across them: query i sees keys j with j // K <= (i + M − N) // K. A multiple
            of the blocks of ``near``, which must be blocks alone.
        near: Add softmax attention inside blocks of this many positions: LLN+Diag. A
            :class:`lln.Near` says more: windows that are wider than their block, first keys that
            all see, one normaliser for both branches.
        mix: "average" of the two branches (the paper's); or the weight of LLN, a number or ``[H]``.
        gamma: For one normaliser: logarithm of the factor of LLN's weights, a number, ``[H]`` or
            ``[B, H]``; measured if left out, so needed with ``is_causal``.
        features: What LLN sees instead of q and k, ``[B, H, N, S]`` and ``[B, Hkv, M, S]``:
            logarithms of positive features, before alpha and beta, which are then required; any
            number of slots S.
        method: "paper", "variance", "entropy" or a :class:`lln.moments.MomentFit`.
        normalize_keys: Use ln D + log_softmax_l(beta k_j) as key features: the unbiased variant.
        impl: "triton", "mixed", "eager" or "reference", obeyed or refused with the reason; None
            takes the fastest that accepts the tensors, which :func:`which` names.

    Returns:
        Same dtype as ``q``; 0 for queries that see no key. Sums are kept in float32 or wider.

    Numerics: computed as a product of two softmaxes, equal to eq. (8) exactly; there is no eps and
    nothing to overflow.

    Example:
        >>> out = lln.attention(q, k, v, key_mask=mask)     # [8, 12, 4096, 64] -> the same
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v)
    check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
    check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q)
    near = read_near(near, q.shape[-1], mix, gamma)
    q_features, k_features = read_features(q, k, features, alpha)
    causal_block = read_causal_block(causal_block, is_causal=is_causal, near=near)
    weight = read_mix(mix, q.shape[1], q)
    scales = _scales(
        q, k, alpha, beta, key_mask, query_mask, is_causal, method, normalize_keys, impl
    )
    alpha, beta = scales
    if normalize_keys:
        q_features = q if q_features is None else q_features
        k_features = normalized_keys(k if k_features is None else k_features, beta, key_mask)
        beta = torch.ones_like(beta)
    options = {"alpha": alpha, "beta": beta, "key_mask": key_mask}
    if near is None:
        seen = q if q_features is None else q_features, k if k_features is None else k_features
        if is_causal:
            return causal(*seen, v, **options, causal_block=causal_block, impl=impl)
        return bidirectional(*seen, v, **options, impl=impl)
    options |= {"near": near, "is_causal": is_causal, "q_far": q_features, "k_far": k_features}
    if near.joint:
        level = _level(q, k, gamma, query_mask, **options)
        return near_far(q, k, v, gamma=level, **options, impl=impl)
    return lln_diag(q, k, v, mix=weight, causal_block=causal_block, **options, impl=impl)


@explain_sdpa_arguments
def attention_varlen(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "Tk Hkv D"],
    v: Float[Tensor, "Tk Hkv E"],
    cu_seqlens_q: Int[Tensor, " S1"],
    cu_seqlens_k: Int[Tensor, " S1"] | None = None,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    key_mask: Bool[Tensor, " Tk"] | None = None,
    query_mask: Bool[Tensor, " T"] | None = None,
    is_causal: bool = False,
    near: int | Near | None = None,
    mix: str | float | Tensor = "average",
    gamma: float | Tensor | None = None,
    method: Method = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "T H E"]:
    r"""LLN attention of sequences packed one after the other, without padding.

    Sequence s holds queries ``cu_seqlens_q[s]:cu_seqlens_q[s+1]`` and the keys of the same range of
    ``cu_seqlens_k`` (of ``cu_seqlens_q`` if left out), as in FlashAttention. The result equals
    :func:`attention` on each sequence by itself; see there for the options. ``alpha``, ``beta`` and
    ``gamma`` may also be ``[S, H]``, ``[S, Hkv]`` and ``[S, H]``.

    Args:
        q: Queries of all sequences, ``[T, H, D]``, any floating dtype.
        k: Keys of all sequences, ``[Tk, Hkv, D]``.
        v: Values of all sequences, ``[Tk, Hkv, E]``.
        cu_seqlens_q, cu_seqlens_k: ``[S + 1]`` int32 or int64, starting at 0, never decreasing,
            ending at the number of tokens. Values are checked for CPU tensors.
        key_mask, query_mask: ``[T]``, True = may be attended / a real query.

    Example:
        >>> cu = torch.tensor([0, 100, 350])                       # two sequences
        >>> out = lln.attention_varlen(q, k, v, cu)                # [350, 12, 64] -> [350, 12, 64]
    """
    q, k, v = autocast(q, k, v)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, key_mask, query_mask)
    near = read_near(near, q.shape[-1], mix, gamma)
    check_pair(alpha, beta, is_causal)
    weight = read_mix(mix, q.shape[1], q)
    sequences, heads, key_heads = len(cu_seqlens_q) - 1, q.shape[1], k.shape[1]
    offsets = cu_seqlens_q, cu_seqlens_k
    if alpha is None or beta is None:
        alpha, beta = measure_packed_scales(
            q,
            k,
            *offsets,
            key_mask=key_mask,
            query_mask=query_mask,
            method=method,
            normalize_keys=normalize_keys,
            impl=impl,
        )
    options = {
        "alpha": as_scale("alpha", alpha, sequences, heads, q),
        "beta": as_scale("beta", beta, sequences, key_heads, k),
        "key_mask": key_mask,
        "is_causal": is_causal,
    }
    if near is None or (near.is_plain and weight is None and not normalize_keys):
        if normalize_keys:
            k, options["beta"] = _normalized_packed(k, cu_seqlens_k, options["beta"], key_mask)
        blocks = {} if near is None else near.blocks
        return varlen(q, k, v, *offsets, **blocks, **options, impl=impl)
    if near.joint:
        if gamma is None:
            check_level(is_causal)
        else:
            gamma = as_level("gamma", gamma, sequences, heads, q)

    def attend(q, k, v, query_mask, gamma, **options):
        if normalize_keys:
            k_far = normalized_keys(k, options["beta"], options["key_mask"])
            options |= {"q_far": q, "k_far": k_far, "beta": torch.ones_like(options["beta"])}
        if not near.joint:
            return lln_diag(q, k, v, mix=weight, near=near, **options, impl=impl)
        level = _level(q, k, gamma, query_mask, near=near, **options)
        return near_far(q, k, v, gamma=level, near=near, **options, impl=impl)

    per_sequence = {"alpha": options.pop("alpha"), "beta": options.pop("beta"), "gamma": gamma}
    return in_groups(attend, q, k, v, *offsets, query_mask=query_mask, **per_sequence, **options)


def _normalized_packed(
    k: Tensor, cu_k: Tensor, beta: Tensor, key_mask: Tensor | None
) -> tuple[Float[Tensor, "T Hkv D"], Float[Tensor, "S Hkv"]]:
    """Normalised keys of packed sequences, each by its own beta, and the beta = 1 left for them."""
    lengths = cu_k.diff().to(k.device)
    of_tokens = beta.repeat_interleave(lengths, dim=0, output_size=k.shape[0])
    mask = None if key_mask is None else key_mask[:, None]
    return normalized_keys(k[:, :, None], of_tokens, mask)[:, :, 0], torch.ones_like(beta)


def _level(
    q, k, gamma, query_mask, *, near: Near, alpha, beta, key_mask, is_causal, q_far=None, k_far=None
) -> Float[Tensor, "B H"]:  # fmt: skip
    """gamma as it is given, or measured."""
    if gamma is not None:
        return as_level("gamma", gamma, q.shape[0], q.shape[1], q)
    check_level(is_causal)
    return match_level(
        q, k, alpha=alpha, beta=beta, near=near, q_far=q_far, k_far=k_far, key_mask=key_mask,
        query_mask=query_mask,
    )  # fmt: skip


def prefill(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N E"],
    state: State | None = None,
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Bool[Tensor, "B N"] | None = None,
    normalize_keys: bool = False,
    impl: str | None = None,
) -> tuple[Float[Tensor, "B H N E"], State]:
    r"""Causal LLN attention over the next tokens of a stream: state in, outputs and state out.

    Feeding a sequence in pieces of any size, down to single tokens (decoding), gives the same
    outputs as one causal :func:`attention` over all of it, at O(D E) memory per head.

    Args:
        q: Queries of the next tokens, ``[B, H, N, D]``, any floating dtype.
        k: Their keys ``[B, Hkv, N, D]``.
        v: Their values ``[B, Hkv, N, E]``.
        state: What came before; None at the start of the stream.
        alpha, beta: As in :func:`attention`; required, since statistics must not see the future.

    Example:
        >>> out, state = lln.prefill(q, k, v, alpha=2.0, beta=2.0)             # the prompt
        >>> out, state = lln.prefill(q1, k1, v1, state, alpha=2.0, beta=2.0)   # one more token
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} tokens but k has {k.shape[2]}; prefill takes the queries and keys "
            "of the same new tokens, earlier keys come with state="
        )
    check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
    scales = {
        "alpha": as_scale("alpha", alpha, q.shape[0], q.shape[1], q),
        "beta": as_scale("beta", beta, k.shape[0], k.shape[1], k),
    }
    if normalize_keys:
        k = normalized_keys(k, scales["beta"], key_mask)
        scales["beta"] = torch.ones_like(scales["beta"])
    if _decodes_in_one_launch(q, k, v, state, impl):
        assert state is not None
        out, log_mass, mean = triton.decode(
            q,
            k,
            v,
            state.log_mass,
            state.mean,
            **scales,
            key_mask=key_mask,
        )
        return out, State(log_mass, mean)
    added = summarize(k, v, beta=scales["beta"], key_mask=key_mask, impl=impl)
    after = added if state is None else state.merge(added)
    if q.shape[2] == 1:
        return read(q, after, alpha=scales["alpha"], impl=impl), after
    options = {**scales, "key_mask": key_mask}
    return causal(q, k, v, **options, state=state, impl=impl), after


def which(
    q: Float[Tensor, "B H N D"] | Float[Tensor, "T H D"],
    k: Float[Tensor, "B Hkv M D"] | Float[Tensor, "Tk Hkv D"],
    v: Float[Tensor, "B Hkv M E"] | Float[Tensor, "Tk Hkv E"],
    *,
    is_causal: bool = False,
    causal_block: int | None = None,
    near: int | Near | None = None,
    mix: str | float | Tensor = "average",
    normalize_keys: bool = False,
    dropout: float = 0.0,
    impl: str | None = None,
) -> str:
    """The name of the implementation that runs for these tensors.

    "triton": our kernels. "mixed": LLN+Diag whose branches have kernels but none for both, or near
    and far keys of which the far ones have none. "eager": plain PyTorch in linear time.
    "reference": the O(N²) definition, only if asked.

    Args:
        q, k, v: ``[B, H, N, D]``, ``[B, Hkv, M, D]`` and ``[B, Hkv, M, E]`` as for
            :func:`attention`, or packed, ``[T, H, D]``, ``[Tk, Hkv, D]`` and ``[Tk, Hkv, E]``, as
            for :func:`attention_varlen`; any floating dtype.
        dropout: Probability to drop attention weights, as :class:`lln.nn.LLNAttention` does while
            training.

    Raises:
        ValueError: ``impl`` is unknown, or refused for these tensors; the message says why.

    Example:
        >>> lln.which(q, k, v)        # CPU tensors
        'eager'
    """
    q, k, v = autocast(q, k, v)
    packed = isinstance(q, Tensor) and q.dim() == 3
    (check_packed_qkv if packed else check_qkv)(q, k, v)
    near = read_near(near, q.shape[-1], mix)
    causal_block = read_causal_block(causal_block, is_causal=is_causal, near=near)
    needs = {"dropout"} if dropout else set()
    op = "causal" if is_causal else "bidirectional"
    op = op if causal_block is None else "block_causal"
    window = ()
    if near is not None:
        op, window = "near_far" if near.joint else "lln_diag", near.window
        needs |= near.needs
        if read_mix(mix, q.shape[1], q) is not None:
            needs.add("learned_mix")
        if normalize_keys and not near.joint:
            needs.add("features")
    plain = near is None or not (near.joint or needs - {"dropout"})
    if packed and plain and causal_block is None:
        op = "varlen"
    call = Call(op, q, k, v, frozenset(needs), is_causal, *window, causal_block=causal_block)
    return name_of(choose(call, impl))


def _decodes_in_one_launch(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, impl: str | None
) -> bool:
    """Whether the decoding kernel serves: a single token, a state and no gradient."""
    if q.shape[2] != 1 or state is None or impl not in (None, "triton"):
        return False
    tensors = (q, k, v, state.log_mass, state.mean)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return triton.refuses(Call("decode", q, k, v)) is None


def _scales(
    q, k, alpha, beta, key_mask, query_mask, is_causal, method, normalize_keys, impl
) -> tuple[Tensor, Tensor]:
    check_pair(alpha, beta, is_causal)
    if alpha is not None:
        return (
            as_scale("alpha", alpha, q.shape[0], q.shape[1], q),
            as_scale("beta", beta, k.shape[0], k.shape[1], k),
        )
    return measure_scales(
        q,
        k,
        key_mask=key_mask,
        query_mask=query_mask,
        method=method,
        normalize_keys=normalize_keys,
        impl=impl,
    )
