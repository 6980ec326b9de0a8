"""LLNMultiheadAttention: ``torch.nn.MultiheadAttention`` with LLN attention inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.init import constant_, xavier_normal_, xavier_uniform_

from lln.moments import MomentFit
from lln.nn import sharded
from lln.nn.attention import LLNAttention
from lln.nn.masks import check_causal_mask, pad_nested, unpad_nested, valid_keys
from lln.ops.common.arguments import is_dtensor
from lln.ops.window.near import Near


class LLNMultiheadAttention(nn.MultiheadAttention):
    r"""Drop-in for :class:`torch.nn.MultiheadAttention`: projections, heads, LLN attention.

    Same constructor arguments (then those of :class:`lln.nn.LLNAttention`), same ``forward``, same
    returned tuple, same names in the state dict: weights load from a softmax module and back. LLN's
    own entries, if the options ask for any, live under ``attention.``; loading a softmax state dict
    leaves them as they are.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first:
            As in torch, where ``dropout`` acts as in :class:`lln.nn.LLNAttention`.
        near, mix, gamma, conv: See :class:`lln.nn.LLNAttention`.
        method, statistics, alpha, beta, sharpness, normalize_keys: See there, too.
        feature_map, slots, center_keys: See there, too.
        learn_scale, impl: See there, too. Causality is an argument of ``forward``, as in
            torch. Cross-attention (``query is not key``) needs statistics="running" or "fixed".

    Numerics: ``need_weights=True`` (torch's default) builds the N×M matrix; pass False to keep the
    cost linear. The output is the same either way.

    Example:
        >>> layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
        >>> layer.self_attn = LLNMultiheadAttention(256, 4, batch_first=True, near=64)
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
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
        impl: str | None = None,
    ) -> None:
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim={embed_dim} must be a positive multiple of num_heads={num_heads}"
            )
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        # torch's encoder layers run their own softmax kernel in eval mode when this is True.
        self._qkv_same_embed_dim = False
        counting = {"near": near, "conv": conv or None}
        counting = {name: value for name, value in counting.items() if value is not None}
        if counting and (add_bias_kv or add_zero_attn):
            name, value = next(iter(counting.items()))
            raise ValueError(
                f"{name}={value} counts positions, and the extra keys of add_bias_kv and "
                f"add_zero_attn have none; use {name} without them"
            )
        self.attention = LLNAttention(
            num_heads,
            embed_dim // num_heads,
            near=near,
            method=method,
            statistics=statistics,
            alpha=alpha,
            beta=beta,
            sharpness=sharpness,
            normalize_keys=normalize_keys,
            mix=mix,
            gamma=gamma,
            feature_map=feature_map,
            slots=slots,
            center_keys=center_keys,
            conv=conv,
            learn_scale=learn_scale,
            dropout=dropout,
            impl=impl,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> LLNMultiheadAttention:
        """LLN between the projections of a torch module, whose parameters the new one shares.

        The filter of ``conv`` starts at zero, as what it would add to a trained model is noise.
        Pruned or parametrized projections are refused: there is no parameter to share.

        Args:
            options: Those of LLN, by name.

        Example:
            >>> encoder.layers[0].self_attn = LLNMultiheadAttention.from_torch(
            ...     encoder.layers[0].self_attn, near=64)
        """
        _check_plain_parameters(module)
        weight = module.out_proj.weight
        new = cls(
            module.embed_dim,
            module.num_heads,
            dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device="meta",
            **options,
        )
        new.attention.to_empty(device=weight.device).to(weight.dtype).reset_parameters()
        if new.attention.conv_weight is not None:
            nn.init.zeros_(new.attention.conv_weight)
        new._parameters.update(module._parameters)
        new.out_proj = module.out_proj
        return new.train(module.training)

    def forward(
        self,
        query: Float[Tensor, "... dim"],
        key: Float[Tensor, "... kdim"],
        value: Float[Tensor, "... vdim"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with torch's shapes and conventions.

        Args:
            query, key, value: Tokens ``[B, N, dim]``, ``[B, M, kdim]`` and ``[B, M, vdim]`` with
                ``batch_first=True``, else ``[N, B, dim]`` and so on; ``[N, dim]`` without a batch;
                any floating dtype. Heads are made here.
            key_padding_mask: True (or −inf) = ignore this key. In self-attention (``query is key``)
                the same tokens are also left out of the query statistics; with another ``query``
                every one of its tokens counts.
            need_weights: Also return the attention matrix, O(L S) time and memory.
            attn_mask: None, or the square causal mask together with ``is_causal=True``.
            is_causal: Needs ``statistics="running"`` or ``"fixed"``; unlike in torch it may be
                given without the mask.

        Returns:
            The output, and the weights (averaged over heads unless ``average_attn_weights=False``)
            or None. Weights times values give the output before ``out_proj``; extra keys of
            ``add_bias_kv`` and ``add_zero_attn`` are the last columns, as in torch.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            return self._forward_nested(
                query, key, value, key_padding_mask, need_weights, attn_mask
            )
        self._check_inputs(query, key, value)
        query_is_key, batched = query is key, query.dim() == 3
        if not batched:
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = self._project(query, key, value)
        queries, keys = q.shape[2], k.shape[2]
        check_causal_mask(attn_mask, is_causal=is_causal, queries=queries, keys=keys)
        key_mask = valid_keys(key_padding_mask, (k.shape[0], keys))
        query_mask = key_mask if query_is_key else None
        masks: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask}
        order: dict[str, Any] = {
            "is_causal": is_causal,
            "is_cross": not (query_is_key or is_causal),
        }
        if is_dtensor(q):
            heads, weights = self._attend_sharded(q, k, v, masks, order, need_weights), None
        else:
            heads, weights = self._attend(q, k, v, masks, order, need_weights)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: dict[str, Any],
        order: dict[str, Any],
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Give the output of each head, and its matrix if that is wanted."""
        keys = k.shape[2]
        k, v, masks["key_mask"] = self._add_extra_keys(k, v, masks["key_mask"])
        draw = self.attention.draw(q, k, **masks, **order, dropout=self.dropout)
        heads = self.attention.attend(q, k, v, draw)
        if not need_weights:
            return heads, None
        return heads, self.attention.attend_identity(q, k, draw).roll(keys - k.shape[2], -1)

    def _attend_sharded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: dict[str, Any],
        order: dict[str, Any],
        need_weights: bool,
    ) -> Tensor:
        """Give the output of each head, where they are split over processes."""
        if need_weights or self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "need_weights=True, add_bias_kv and add_zero_attn are refused for DTensors; leave "
                "them out, with need_weights=False"
            )
        return sharded.attend(self.attention, q, k, v, **masks, **order, dropout=self.dropout)

    @torch.no_grad()
    def calibrate_(
        self,
        query: Float[Tensor, "... dim"],
        key: Float[Tensor, "... kdim"] | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> LLNMultiheadAttention:
        """Set the stored statistics from these inputs; ``key`` defaults to ``query``.

        See :meth:`lln.nn.LLNAttention.calibrate_`. Returns the module.

        Args:
            query, key: Tokens ``[B, N, dim]`` and ``[B, M, kdim]``, laid out as in ``forward``, any
                floating dtype.
        """
        key = query if key is None else key
        self._check_inputs(query, key)
        (q_weight, k_weight, _), (q_bias, k_bias, _) = self._projections()
        q = self._split_heads(F.linear(query, q_weight, q_bias))
        k = self._split_heads(F.linear(key, k_weight, k_bias))
        if key_padding_mask is not None and key.dim() == 2:
            key_padding_mask = key_padding_mask[None]
        key_mask = valid_keys(key_padding_mask, (k.shape[0], k.shape[2]))
        self.attention.calibrate_(q, k, key_mask, key_mask if query is key else None)
        return self

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
    ) -> tuple[Tensor, None]:
        """Self-attention on a nested batch, which ``nn.TransformerEncoder`` may produce in eval."""
        masked = key_padding_mask is not None or attn_mask is not None
        if query is not key or key is not value or masked or need_weights:
            raise ValueError(
                "nested tensors are accepted as query = key = value with need_weights=False and "
                "without masks; pad the others with x.to_padded_tensor(0.0) and key_padding_mask"
            )
        padded, valid = pad_nested(query)
        x = padded if self.batch_first else padded.transpose(0, 1)
        out, _ = self.forward(x, x, x, key_padding_mask=~valid, need_weights=False)
        return unpad_nested(out if self.batch_first else out.transpose(0, 1), valid), None

    def _projections(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Weights and biases of q, k, v, whichever way they are stored."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias = self.in_proj_bias
        return weights, (None, None, None) if bias is None else bias.chunk(3)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v as ``[B, H, tokens, D]``."""
        if query is key and key is value and self.in_proj_weight is not None:
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return tuple(self._split_heads(x) for x in packed.chunk(3, dim=-1))
        inputs = zip((query, key, value), *self._projections(), strict=True)
        return tuple(self._split_heads(F.linear(x, weight, bias)) for x, weight, bias in inputs)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Torch's layouts to ``[B, H, tokens, D]``; an unbatched input becomes a batch of one."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            x = x[None]
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.transpose(1, 2)

    def _add_extra_keys(
        self, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The learned and the zero key, put first: there every query sees them, causal or not."""
        keys, values = [k], [v]
        if self.add_zero_attn:
            keys.insert(0, torch.zeros_like(k[:, :, :1]))
            values.insert(0, torch.zeros_like(v[:, :, :1]))
        if self.bias_k is not None and self.bias_v is not None:
            for parts, bias in ((keys, self.bias_k), (values, self.bias_v)):
                bias = bias.to(k.dtype).view(1, self.num_heads, 1, self.head_dim)
                parts.insert(0, bias.expand(k.shape[0], -1, -1, -1))
        extra = len(keys) - 1
        if extra == 0:
            return k, v, key_mask
        if key_mask is not None:
            key_mask = F.pad(key_mask, (extra, 0), value=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2), key_mask

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
        if query.dim() not in (2, 3):
            raise ValueError(
                f"query has shape {list(query.shape)}; give [tokens, {self.embed_dim}] or a batch "
                f"of it ({'batch first' if self.batch_first else 'tokens first'})"
            )
        inputs = [("query", query, self.embed_dim), ("key", key, self.kdim)]
        if value is not None:
            inputs.append(("value", value, self.vdim))
        batch_axis = 0 if self.batch_first else 1
        for name, x, width in inputs:
            if x.dim() != query.dim() or x.shape[-1] != width:
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; with a {query.dim()}-D query it must have "
                    f"{query.dim()} dimensions, the last of size {width}"
                )
            if x.dim() == 3 and x.shape[batch_axis] != query.shape[batch_axis]:
                raise ValueError(
                    f"{name} has batch size {x.shape[batch_axis]}, query has "
                    f"{query.shape[batch_axis]}; batch_first={self.batch_first} decides which "
                    "dimension is the batch"
                )
        if value is not None and key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"key has shape {list(key.shape)} and value {list(value.shape)}; they must agree "
                "in all but the last dimension"
            )

    def _reset_parameters(self) -> None:
        """Torch's initialisation, told by the parameters themselves which projections exist."""
        matrices = (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        )
        for matrix in matrices:
            if matrix is not None:
                xavier_uniform_(matrix)
        if self.in_proj_bias is not None:
            constant_(self.in_proj_bias, 0.0)
            constant_(self.out_proj.bias, 0.0)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                xavier_normal_(extra)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """A state dict without any of LLN's own entries is a softmax module's: keep ours.

        On the meta device there is nothing to keep: they begin where the assigned weights are.
        """
        own = self.attention.state_dict(prefix=f"{prefix}attention.")
        if not any(name in state_dict for name in own):
            assigned = state_dict.get(f"{prefix}out_proj.weight")
            if local_metadata.get("assign_to_params_buffers") and assigned is not None:
                self._begin_on(assigned.device)
            state_dict.update(self.attention.state_dict(prefix=f"{prefix}attention."))
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def _begin_on(self, device: torch.device) -> None:
        """Give LLN's own entries memory and their first values, if they have none."""
        if any(x.is_meta for x in (*self.attention.parameters(), *self.attention.buffers())):
            self.attention.to_empty(device=device).reset_parameters()

    def extra_repr(self) -> str:
        """The arguments that are not shown by the submodules."""
        shown = {"batch_first": self.batch_first}
        if (self.kdim, self.vdim) != (self.embed_dim, self.embed_dim):
            shown.update(kdim=self.kdim, vdim=self.vdim)
        if self.bias_k is not None:
            shown["add_bias_kv"] = True
        if self.add_zero_attn:
            shown["add_zero_attn"] = True
        options = "".join(f", {name}={value}" for name, value in shown.items())
        return f"{self.embed_dim}, {self.num_heads}{options}"


def _check_plain_parameters(module: nn.MultiheadAttention) -> None:
    """Refuse projections that hooks or parametrizations compute from other parameters."""
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
    for name in (*names, "bias_k", "bias_v"):
        if getattr(module, name, None) is not None and module._parameters.get(name) is None:
            raise ValueError(
                f"{name} of this {type(module).__name__} is no parameter but computed from others "
                "(by torch.nn.utils.prune, parametrize, weight_norm or spectral_norm), and cannot "
                f'be shared; make it plain with prune.remove(module, "{name}") or '
                f'parametrize.remove_parametrizations(module, "{name}"), and apply it to the '
                "result of from_torch instead"
            )
