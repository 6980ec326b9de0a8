"""LLNAttention: the attention core as a module, with its statistics, branches and dropouts."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.moments import MomentFit
from lln.nn.branches import attend_drawn
from lln.nn.draw import Draw, features_by_name, keep_mask
from lln.nn.feature_maps import LOG_FEATURES, FeatureMap, Unrotate, check_feature_map
from lln.nn.levels import KeyCenter, Level
from lln.nn.matching import Matching
from lln.nn.statistics import (
    CAUSAL_NEEDS_STORED_STATISTICS,
    CROSS_NEEDS_STORED_STATISTICS,
    choose_statistics,
)
from lln.ops.common.arguments import autocast, check_mask, check_qkv, is_dtensor
from lln.ops.linear.normalized_keys import normalized_keys
from lln.ops.taps.convolution import check_conv, draw_filters_
from lln.ops.window.near import Near, read_causal_block, read_mix, read_near
from lln.protocols import compute_dtype

MIXES = ("average", "learned")


class LLNAttention(nn.Module):
    r"""Linear log-normal attention on ``[B, H, N, D]``, alone or averaged with a diagonal branch.

    Eq. (8)–(10) of arXiv:2311.13541 in their exact form, and Fig. 3 with ``near``:
        out = A M,  A_il = softmax_l(α q_il + L_l),  M_l = Σ_j exp(β k_jl − L_l) v_j,
        out = w · LLN + (1 − w) · BlockDiagSoftmax,  w = ½ or learned per head.
    One normaliser holds for both if ``near`` says so: :func:`lln.ops.window.near_far.near_far`.

    Args:
        num_kv_heads: Key and value heads, a divisor of ``num_heads`` (GQA); default ``num_heads``.
        causal: Each query sees the keys up to its own position (bottom-right aligned when M ≠ N).
            Needs ``statistics="running"`` or ``"fixed"``.
        causal_block: With ``causal``, full attention inside blocks of this many positions and
            causal attention across them, see :func:`lln.attention`. ``conv`` stays causal
            token by token.
        near: Block size of the softmax branch of LLN+Diag, or a :class:`lln.Near`; None for LLN
            alone.
        method: "paper", "variance", "entropy" or a fitted line, see :func:`lln.match_moments`.
        statistics: Where α and β come from. "sample": measured in each sample and head.
            "running": averages over the training batches, frozen in evaluation, so that the output
            of a sample never depends on its batch there. "fixed": constants, see ``calibrate_``.
            Before the first batch "running" assumes σ_q = σ_k = 1, as does "fixed" without
            ``alpha`` and ``beta``. Causal attention and cross-attention need one of the last two:
            measured over all queries, α and β would let each query see the ones after it.
        alpha, beta: For "fixed": a number, or one value per head (``[H]`` and ``[Hkv]``).
        sharpness: Multiplies the matched α and β. In models that were trained with softmax 0.5 to
            0.7 is a better start than the match itself.
        normalize_keys: Use ln D + log_softmax_l(β k) as key features, the unbiased variant.
        mix: How the branches are put together, as in :func:`lln.attention`: "average", or the
            weight of LLN, a number or one per head. Here also "learned": the weight of LLN in head
            h is sigmoid(mix_logit_h), a parameter that starts at ½.
        gamma: For one normaliser with "fixed": logarithm of the factor of LLN's weights, a number
            or one per head. Otherwise it is measured, averaged and stored as α and β are.
        feature_map, slots: What LLN's features are made of: "identity" (q and k, D slots), "signs"
            (2 D), "rotations" (multiples of D) or "learned" maps (any number, 2 D by default), see
            :class:`lln.nn.feature_maps.FeatureMap`. The softmax branch keeps q and k. The features
            of other papers, "hedgehog" (2 D), "t2r" (any) and "elu" (D), set their own scale:
            α = β = 1, nothing is matched, and ``statistics`` says where γ comes from.
        center_keys: Subtract the mean of the valid keys in both branches: softmax does not see such
            a shift, LLN does. Causal attention takes the stored mean of earlier batches.
        conv: Width of a convolution of the values over neighbouring tokens that is added to the
            output, one filter per key head, learned; 0 leaves it out. Not in the paper:
            Nyströmformer has it. Odd, with equally many neighbours on both sides; causal attention
            looks at the token and at conv − 1 before it. Self-attention only.
        learn_scale: Multiply α by exp(log_alpha_h) and β by exp(log_beta_h), and add gamma_shift_h
            to γ, all learned from zero; maps with a scale of their own learn the last alone.
        dropout: Probability of dropping an entry of the slot weights A and of the block
            probabilities while training; kept entries are divided by 1 − dropout.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.

    Numerics: sums are kept in float32 or wider, the output has the dtype of q. α and β are
    constants of the backward pass except for the learned factors. The learned parameters are zero
    at their neutral value, so weight decay pulls them towards the plain method, and they start
    there, except the filter of ``conv``: it is drawn as torch draws depth-wise convolutions.

    Example:
        >>> core = LLNAttention(num_heads=4, head_dim=64, near=64)
        >>> out = core(q, k, v, key_mask=valid)     # q, k, v [2, 4, 128, 64], valid [2, 128]
    """

    fixed_mix: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        causal_block: int | None = None,
        near: int | Near | None = None,
        method: str | MomentFit = "paper",
        statistics: str = "sample",
        alpha: float | Sequence[float] | Tensor | None = None,
        beta: float | Sequence[float] | Tensor | None = None,
        sharpness: float = 1.0,
        normalize_keys: bool = False,
        mix: str | float | Sequence[float] | Tensor = "average",
        gamma: float | Sequence[float] | Tensor | None = None,
        feature_map: str = "identity",
        slots: int | None = None,
        center_keys: bool = False,
        conv: int = 0,
        learn_scale: bool = False,
        dropout: float = 0.0,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.causal = causal
        self.mix = _plain_mix(mix)
        self.conv = conv
        self.dropout = dropout
        self.learn_scale = learn_scale
        self.slots = check_feature_map(feature_map, slots, head_dim)
        self.impl = impl
        self._check_arguments()
        self.near = read_near(near, head_dim, self.mix, gamma)
        self.causal_block = read_causal_block(causal_block, is_causal=causal, near=self.near)
        matching = Matching(
            num_heads, self.num_kv_heads, head_dim, method, normalize_keys, impl,
            feature_map, self.slots, sharpness,
        )  # fmt: skip
        self.statistics = choose_statistics(
            statistics, matching, alpha=alpha, beta=beta, device=device
        )
        if causal and statistics == "sample":
            raise ValueError(CAUSAL_NEEDS_STORED_STATISTICS)
        if gamma is not None and statistics != "fixed":
            raise ValueError(
                f"gamma={gamma} would be ignored: statistics={statistics!r} measures it; "
                "use statistics='fixed'"
            )
        self.level = self.center = None
        if self.near is not None and self.near.joint:
            options = {"gamma": gamma, "learned": learn_scale, "dtype": dtype, "device": device}
            self.level = Level(statistics, self.near, self.statistics, **options)
        if center_keys:
            self.center = KeyCenter(statistics, self.num_kv_heads, head_dim, device=device)
        self.features = None
        if feature_map != "identity":
            heads = num_heads, self.num_kv_heads
            kinds: dict[str, Any] = {"device": device, "dtype": dtype}
            self.features = FeatureMap(feature_map, *heads, head_dim, self.slots, **kinds)

        def learned(*shape: int, wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None

        self.mix_logit = learned(num_heads, wanted=self.mix == "learned")
        fixed = None if isinstance(self.mix, str) else torch.empty(num_heads, device=device)
        self.register_buffer("fixed_mix", fixed)
        self.conv_weight = learned(self.num_kv_heads, conv, wanted=conv > 0)
        matched = feature_map not in LOG_FEATURES
        if learn_scale and not matched and self.level is None:
            raise ValueError(
                f"learn_scale=True has nothing to learn: feature_map={feature_map!r} sets its own "
                "scale; give near=lln.Near(…, joint=True), whose gamma is learned, or leave it out"
            )
        self.log_alpha = learned(num_heads, wanted=learn_scale and matched)
        self.log_beta = learned(self.num_kv_heads, wanted=learn_scale and matched)
        self.reset_parameters()

    @property
    def key_dim(self) -> int:
        """Width of queries and keys."""
        return self.head_dim

    @property
    def scale(self) -> float:
        """Factor of q·k in the near field; 1/√head_dim without one."""
        given = None if self.near is None else self.near.scale
        return self.head_dim**-0.5 if given is None else given

    @property
    def positions_matter(self) -> bool:
        """Whether padding before the first token changes the output, as it moves the blocks."""
        return self.near is not None or self.causal_block is not None

    def mix_weight(self, dtype: torch.dtype | None = None) -> Float[Tensor, " H"] | None:
        """The weight of LLN beside the softmax branch; None for ½ (and one normaliser)."""
        logit = self.mix_logit
        if logit is not None:
            return (logit if dtype in (None, logit.dtype) else logit.to(dtype)).sigmoid()
        return None if self.fixed_mix is None else self.fixed_mix.to(dtype or self.fixed_mix.dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start again: what is learned, and the stored statistics.

        Call it after ``to_empty`` if the module was made on the meta device.
        """
        for part in (self.statistics, self.level, self.center, self.features):
            if part is not None:
                part.reset_parameters()
        if self.fixed_mix is not None:
            self.fixed_mix.copy_(torch.tensor(self.mix))
        for parameter in (self.mix_logit, self.log_alpha, self.log_beta):
            if parameter is not None:
                torch.nn.init.zeros_(parameter)
        if self.conv_weight is not None:
            draw_filters_(self.conv_weight, self.conv)

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        v: Float[Tensor, "B Hkv M E"],
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Attend; masks are True at valid tokens.

        ``key_mask`` says which keys may be attended. ``query_mask`` says which queries count for
        the statistics, and only that: every query gets an output. Neither is guessed from the
        other. q, k and v may be DTensors that are split alike, see :func:`lln.attention`.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
            v: Values ``[B, Hkv, M, E]``.
        """
        if is_dtensor(q):
            masks: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask}
            options: dict[str, Any] = {
                "is_causal": self.causal,
                "is_cross": q.shape[2] != k.shape[2],
            }
            from lln.nn import sharded

            return sharded.attend(self, q, k, v, **masks, **options, dropout=self.dropout)
        q, k, v = autocast(q, k, v)
        self._check_inputs(q, k, key_mask, query_mask)
        check_qkv(q, k, v)
        return self.attend_in_model(q, k, v, key_mask, query_mask, is_causal=self.causal)

    def attend_in_model(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        v: Float[Tensor, "B Hkv M E"],
        key_mask: Bool[Tensor, "B M"] | None,
        query_mask: Bool[Tensor, "B N"] | None,
        *,
        is_causal: bool,
        dropout: float | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Attend as :meth:`forward` does, on inputs that a model has checked, as it says.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
            v: Values ``[B, Hkv, M, E]``.
        """
        masks: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask}
        options: dict[str, Any] = {"is_causal": is_causal, "is_cross": q.shape[2] != k.shape[2]}
        return self.attend(q, k, v, self.draw(q, k, **masks, **options, dropout=dropout))

    def attention_matrix(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B H N M"]:
        """P with P v = output for every v, O(N M) memory: for looking at, not for long inputs.

        In training mode this is a forward pass like any other: dropout acts and running statistics
        move.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
        """
        q, k = autocast(q, k)
        self._check_inputs(q, k, key_mask, query_mask)
        masks = {"key_mask": key_mask, "query_mask": query_mask}
        options: dict[str, Any] = {"is_causal": self.causal, "is_cross": q.shape[2] != k.shape[2]}
        return self.attend_identity(q, k, self.draw(q, k, **masks, **options))

    @torch.no_grad()
    def calibrate_(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
    ) -> LLNAttention:
        """Set the stored statistics ("running") or α and β ("fixed") from these tensors.

        Variances are averaged over the samples, weighted by their valid tokens. Returns the module.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
        """
        self._check_inputs(q, k, key_mask, query_mask)
        masks = {"key_mask": key_mask, "query_mask": query_mask}
        if self.center is not None:
            self.center.calibrate_(k, key_mask)
            k = k - self.center(k, key_mask, is_causal=self.causal)
        self.statistics.calibrate_(q, k, **masks)
        if self.level is not None:
            alpha, beta = (x.expand(len(q), -1) for x in self.scales())
            far = self.far_inputs(q, k, beta, key_mask)
            options = {"is_causal": self.causal, **features_by_name(far), **masks}
            self.level.calibrate_(q, k, alpha=alpha, beta=self.far_beta(beta), **options)
        return self

    def scales(self) -> tuple[Float[Tensor, " H"], Float[Tensor, " Hkv"]]:
        """α and β as evaluation uses them, for :func:`lln.prefill` and :func:`lln.attention`."""
        return self._learned(*self.statistics.stored())

    def _learned(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the learned factors, if there are any."""
        if self.log_alpha is None or self.log_beta is None:
            return alpha, beta
        dtype = torch.promote_types(alpha.dtype, self.log_alpha.dtype)
        factors = self.log_alpha.to(dtype).exp(), self.log_beta.to(dtype).exp()
        return alpha.to(dtype) * factors[0], beta.to(dtype) * factors[1]

    def draw(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        *,
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
        is_causal: bool = False,
        is_cross: bool = False,
        dropout: float | None = None,
        unrotate: Unrotate | None = None,
    ) -> Draw:
        """Take the statistics of one forward pass and draw its dropout masks.

        With ``is_cross`` α and β are never measured over the queries at hand: in the
        cross-attention of a decoder each query would see the ones after it.

        ``unrotate`` serves feature maps that see q and k before rotary positions are applied; σ of
        q and k is that of the rotated ones, which differs by the mean of all coordinates alone.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
        """
        batch, dtype = q.shape[0], compute_dtype(q, k)
        masks = {"key_mask": key_mask, "query_mask": query_mask}
        if is_cross and self.statistics.per_sample:
            raise ValueError(CROSS_NEEDS_STORED_STATISTICS)
        ordered = is_causal or is_cross
        center = None
        if self.center is not None:
            center = self.center(k, key_mask, is_causal=is_causal)
            k = k - center
        statistics = self.statistics
        alpha, beta = self._learned(*statistics(q, k, **masks, is_causal=ordered))
        if not statistics.per_sample:
            alpha, beta = (x.to(dtype).expand(batch, -1) for x in (alpha, beta))
        far = self.far_inputs(q, k, beta, key_mask, unrotate) if self.has_features else None
        beta = self.far_beta(beta)
        gamma = None
        if self.level is not None:
            options = {
                "is_causal": is_causal,
                "is_ordered": ordered,
                **masks,
                **features_by_name(far),
            }
            gamma = self.level(q, k, alpha=alpha, beta=beta, **options)
        dropout = self.dropout if dropout is None else dropout
        dropout = dropout if self.training else 0.0
        columns = None if self.near is None else self.near.keys(is_causal)
        return Draw(
            alpha=alpha,
            beta=beta,
            gamma=gamma,
            key_mask=key_mask,
            is_causal=is_causal,
            mix=self.mix_weight(dtype),
            center=center,
            slot_dropout=keep_mask(q, self.slots, dropout),
            probability_dropout=keep_mask(q, columns, dropout),
            far=far,
        )

    def decoding_inputs(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        beta: Float[Tensor, "*b Hkv"],
        unrotate: Unrotate | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, and what LLN sees of queries and keys, as causal evaluation uses them.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
            beta: That of :meth:`scales`; :meth:`far_beta` is left for what LLN sees.
        """
        if self.center is not None:
            k = k - self.center(k, None, is_causal=True)
        return k, *self.far_inputs(q, k, beta, None, unrotate)

    def stored_level(self) -> Float[Tensor, " H"]:
        """γ as evaluation uses it; only with one normaliser and stored statistics."""
        if self.level is None or self.level.stored is None:
            raise ValueError(
                "no gamma is stored; it takes near with joint=True and stored statistics"
            )
        return self.level.shifted(self.level.stored.value[0])

    @property
    def has_features(self) -> bool:
        """Whether the LLN branch sees something else than queries and (centred) keys."""
        return self.features is not None or self.statistics.matching.normalize_keys

    def far_inputs(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        beta: Float[Tensor, "*b Hkv"],
        key_mask: Bool[Tensor, "B M"] | None = None,
        unrotate: Unrotate | None = None,
    ) -> tuple[Float[Tensor, "B H N S"], Float[Tensor, "B Hkv M S"]]:
        """What the LLN branch sees of queries and (centred) keys, before α and :meth:`far_beta`.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
        """
        if self.features is not None:
            q, k = self.features(q, k, unrotate)
        if self.statistics.matching.normalize_keys:
            k = normalized_keys(k, beta, key_mask)
        return q, k

    def far_beta(self, beta: Float[Tensor, "*b Hkv"]) -> Float[Tensor, "*B Hkv"]:
        """β of what :meth:`far_inputs` gives: 1 where the keys were normalised with it."""
        return torch.ones_like(beta) if self.statistics.matching.normalize_keys else beta

    def attend(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        v: Float[Tensor, "B Hkv M E"],
        draw: Draw,
        impl: str | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """The output for a draw; linear in v.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
            v: Values ``[B, Hkv, M, E]``.
        """
        return attend_drawn(
            q,
            k if draw.center is None else k - draw.center,
            v,
            draw,
            near=self.near,
            causal_block=self.causal_block,
            conv=self.conv_weight,
            impl=impl or self.impl,
        )

    def for_queries(self, x: Float[Tensor, "B Hkv N E"]) -> Float[Tensor, "B H N E"]:
        """Repeat what belongs to a key head for all query heads that share it."""
        group = self.num_heads // self.num_kv_heads
        return x if group == 1 else x.repeat_interleave(group, dim=1)

    def attend_identity(
        self, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], draw: Draw
    ) -> Float[Tensor, "B H N M"]:
        """The attention matrix of a draw: its output for v = identity.

        Args:
            q: Queries ``[B, H, N, D]``, any floating dtype.
            k: Keys ``[B, Hkv, M, D]``.
        """
        keys = k.shape[2]
        if keys == 0:
            return q.new_zeros((*q.shape[:3], 0))
        identity = torch.eye(keys, dtype=q.dtype, device=q.device)
        identity = identity.expand(k.shape[0], k.shape[1], keys, keys)
        return self.attend(q, k, identity, draw, impl="eager")

    def _check_inputs(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
    ) -> None:
        for name, x, heads in (("q", q, self.num_heads), ("k", k, self.num_kv_heads)):
            if x.ndim != 4 or x.shape[1] != heads or x.shape[3] != self.head_dim:
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; this module takes "
                    f"[batch, {heads}, tokens, {self.head_dim}] (heads before tokens)"
                )
        check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
        check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q)

    def _check_arguments(self) -> None:
        """Raise for what is wrong at construction, before anything is computed."""
        if min(self.num_heads, self.head_dim, self.num_kv_heads) < 1:
            raise ValueError(
                f"num_heads={self.num_heads}, head_dim={self.head_dim}, "
                f"num_kv_heads={self.num_kv_heads} must be positive"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if isinstance(self.mix, str) and self.mix not in MIXES:
            raise ValueError(f"mix={self.mix!r} is unknown; choose from {', '.join(MIXES)}")
        if not isinstance(self.mix, str):
            read_mix(torch.tensor(self.mix), self.num_heads, torch.empty(0))
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout={self.dropout} is not a probability in [0, 1]")
        check_conv(self.conv, causal=self.causal)

    def extra_repr(self) -> str:
        """Heads, width, and the options that differ from their defaults."""
        options = {
            "num_kv_heads": (self.num_kv_heads, self.num_heads),
            "causal": (self.causal, False),
            "causal_block": (self.causal_block, None),
            "near": (self.near and self.near.shown(self.head_dim), None),
            "center_keys": (self.center is not None, False),
            "mix": (self.mix, "average"),
            "conv": (self.conv, 0),
            "learn_scale": (self.learn_scale, False),
            "dropout": (self.dropout, 0.0),
            "impl": (self.impl, None),
        }
        shown = [f"{name}={value!r}" for name, (value, usual) in options.items() if value != usual]
        return ", ".join([str(self.num_heads), str(self.head_dim), *shown])


def _plain_mix(mix: Any) -> Any:
    """Give ``mix`` as a word, a number or a list of numbers, which a config can hold."""
    if isinstance(mix, str):
        return mix
    values = mix.tolist() if isinstance(mix, Tensor) else mix
    numbers = values if isinstance(values, (list, tuple)) else [values]
    if any(isinstance(x, bool) or not isinstance(x, Real) for x in numbers):
        raise TypeError(
            f"mix={mix!r} is not possible; choose from {', '.join(MIXES)}, or give the weight of "
            "LLN, a number or one per head"
        )
    return [float(x) for x in values] if isinstance(values, (list, tuple)) else float(values)
