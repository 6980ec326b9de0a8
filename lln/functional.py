"""LLN attention as a function: argument checks, statistics, choice of op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.moments.calibration import calibrate, calibrate_packed
from lln.ops import triton
from lln.ops.arguments import as_scale, autocast, check_mask, check_positive_int, check_qkv
from lln.ops.bidirectional import bidirectional
from lln.ops.causal import causal
from lln.ops.dispatch import choose, name_of
from lln.ops.lln_diag import lln_diag
from lln.ops.state import State, read, summarize
from lln.ops.varlen import check_packed, check_packed_qkv, varlen
from lln.protocols import Call

if TYPE_CHECKING:
    from lln.moments import MomentFit

    Method = str | MomentFit

P = ParamSpec("P")
R = TypeVar("R")

_REMEDIES = {
    "attn_mask": "linear attention never forms the scores it would act on. Possible are key_mask "
    "(ignore keys), is_causal=True, diag_block (a local softmax branch) and attention_varlen "
    "(packed sequences)",
    "dropout_p": "a function has no training mode to drop in; lln.nn.LLNAttention(..., dropout=) "
    "drops attention weights while training",
    "enable_gqa": "leave it out: k and v may always have fewer heads than q",
}


def explain_sdpa_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Tell who comes from scaled_dot_product_attention what to write instead."""

    @functools.wraps(function)
    def explained(*args: P.args, **options: P.kwargs) -> R:
        for name, remedy in _REMEDIES.items():
            if name in options:
                raise TypeError(f"{name} is refused: {remedy}")
        return function(*args, **options)

    return explained


@explain_sdpa_arguments
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
    diag_block: int | None = None,
    scale: float | None = None,
    method: Method = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    r"""Linear Log-Normal attention in O((N + M) D E) time; called like SDPA.

    Eq. (8) of arXiv:2311.13541, with phi_q(x) = exp(alpha x), phi_k(x) = exp(beta x) elementwise:
        out_i = sum_j phi_q(q_i)·phi_k(k_j) v_j / sum_j phi_q(q_i)·phi_k(k_j)

    Args:
        q: Queries ``[B, H, N, D]``: batch, heads, tokens, head size; any floating dtype.
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
        diag_block: Average with softmax attention inside blocks of this many positions: LLN+Diag.
        scale: Factor of the scores in the blocks, so only with them; 1/sqrt(D) by default.
        method: "paper", "variance", "entropy" or a :class:`lln.moments.MomentFit`.
        normalize_keys: Use log_softmax_l(beta k_j) as key features: the unbiased variant.
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
    check_block_options(scale, diag_block)
    scales = _scales(
        q, k, alpha, beta, key_mask, query_mask, is_causal, method, normalize_keys, impl
    )
    options = {
        "alpha": scales[0],
        "beta": scales[1],
        "key_mask": key_mask,
        "normalize_keys": normalize_keys,
        "impl": impl,
    }
    if diag_block is not None:
        block = {"block": diag_block, "scale": block_scale(scale, diag_block, q.shape[-1])}
        return lln_diag(q, k, v, is_causal=is_causal, **block, **options)
    return (causal if is_causal else bidirectional)(q, k, v, **options)


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
    diag_block: int | None = None,
    scale: float | None = None,
    method: Method = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "T H E"]:
    r"""LLN attention of sequences packed one after the other, without padding.

    Sequence s holds queries ``cu_seqlens_q[s]:cu_seqlens_q[s+1]`` and the keys of the same range of
    ``cu_seqlens_k`` (of ``cu_seqlens_q`` if left out), as in FlashAttention. The result equals
    :func:`attention` on each sequence by itself; see there for the options. ``alpha`` and ``beta``
    may also be ``[S, H]`` and ``[S, Hkv]``.

    Args:
        q, k, v: ``[T, H, D]``, ``[Tk, Hkv, D]`` and ``[Tk, Hkv, E]``: the tokens of all sequences.
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
    check_block_options(scale, diag_block)
    check_pair(alpha, beta, is_causal)
    sequences, heads, key_heads = len(cu_seqlens_q) - 1, q.shape[1], k.shape[1]
    if alpha is None or beta is None:
        alpha, beta = calibrate_packed(
            q,
            k,
            cu_seqlens_q,
            cu_seqlens_k,
            key_mask=key_mask,
            query_mask=query_mask,
            method=method,
            normalize_keys=normalize_keys,
            impl=impl,
        )
    return varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        alpha=as_scale("alpha", alpha, sequences, heads, q),
        beta=as_scale("beta", beta, sequences, key_heads, k),
        key_mask=key_mask,
        block=diag_block,
        scale=1.0 if diag_block is None else block_scale(scale, diag_block, q.shape[-1]),
        is_causal=is_causal,
        normalize_keys=normalize_keys,
        impl=impl,
    )


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
        q, k, v: The next tokens, shaped as in :func:`attention`, with equally many of each.
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
            normalize_keys=normalize_keys,
        )
        return out, State(log_mass, mean)
    keys = {"key_mask": key_mask, "normalize_keys": normalize_keys}
    added = summarize(k, v, beta=scales["beta"], impl=impl, **keys)
    after = added if state is None else state.merge(added)
    if q.shape[2] == 1:
        return read(q, after, alpha=scales["alpha"], impl=impl), after
    out = causal(
        q,
        k,
        v,
        **scales,
        **keys,
        state=state,
        impl=impl,
    )
    return out, after


def which(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    diag_block: int | None = None,
    dropout: float = 0.0,
    impl: str | None = None,
) -> str:
    """The name of the implementation that runs for these tensors.

    "triton": our kernels. "mixed": LLN+Diag whose LLN branch has a kernel and whose blocks have
    none. "eager": plain PyTorch in linear time. "reference": the O(N²) definition, only if asked.

    Args:
        q, k, v: As for :func:`attention`, or packed as for :func:`attention_varlen`.
        dropout: Probability to drop attention weights, as :class:`lln.nn.LLNAttention` does while
            training.

    Raises:
        ValueError: ``impl`` is unknown, or refused for these tensors; the message says why.

    Example:
        >>> lln.which(q, k, v)        # CPU tensors
        'eager'
    """
    q, k, v = autocast(q, k, v)
    if diag_block is not None:
        check_positive_int("diag_block", diag_block)
    op = "causal" if is_causal else "bidirectional"
    if isinstance(q, Tensor) and q.dim() == 3:
        check_packed_qkv(q, k, v)
        op = "varlen"
    else:
        check_qkv(q, k, v)
        op = op if diag_block is None else "lln_diag"
    needs = frozenset({"dropout"} if dropout else ())
    return name_of(choose(Call(op, q, k, v, needs, is_causal, diag_block), impl))


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


def check_pair(alpha: object, beta: object, is_causal: bool) -> None:
    """Check that both scales are given or neither, and both if causal."""
    if (alpha is None) != (beta is None):
        given, missing = ("beta", "alpha") if alpha is None else ("alpha", "beta")
        raise ValueError(
            f"{given} was given without {missing}; pass both, e.g. from lln.match_moments, "
            "or neither to have them measured"
        )
    if is_causal and alpha is None:
        raise ValueError(
            "is_causal=True needs alpha and beta: measured from the whole sequence they would let "
            "the future leak into the past. Pass constants, e.g. alpha, beta = "
            "lln.match_moments(sigma_q, sigma_k, head_dim) from calibration data, or use "
            "lln.nn.LLNAttention(..., causal=True, statistics='running')"
        )


def _scales(
    q, k, alpha, beta, key_mask, query_mask, is_causal, method, normalize_keys, impl
) -> tuple[Tensor, Tensor]:
    check_pair(alpha, beta, is_causal)
    if alpha is not None:
        return (
            as_scale("alpha", alpha, q.shape[0], q.shape[1], q),
            as_scale("beta", beta, k.shape[0], k.shape[1], k),
        )
    return calibrate(
        q,
        k,
        key_mask=key_mask,
        query_mask=query_mask,
        method=method,
        normalize_keys=normalize_keys,
        impl=impl,
    )


def check_block_options(scale: float | None, diag_block: int | None) -> None:
    """Check that no option of the diagonal branch is given without one."""
    if scale is not None and diag_block is None:
        raise ValueError(
            f"scale={scale!r} is of the diagonal branch and would be ignored without diag_block; "
            "give diag_block too. LLN itself is scaled by alpha and beta"
        )


def block_scale(scale: float | None, block: int, width: int) -> float:
    """The scale of the block-diagonal branch, checked: 1/sqrt(width) unless given."""
    check_positive_int("diag_block", block)
    if scale is None:
        return width**-0.5
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale={scale!r} must be a finite number, 1/sqrt(head size) by default")
    return float(scale)
