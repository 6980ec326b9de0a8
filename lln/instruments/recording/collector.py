"""The attention calls that were found, as they come, and those that belong to another call."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from torch import Tensor, nn

from lln.instruments.recording.attention_call import AttentionCall, Branches, readable
from lln.instruments.recording.core_call import call_of_core, name_of
from lln.instruments.recording.masks import MaskMeaning, read_sdpa_mask
from lln.ops.window.near import Near


class Collector:
    """Turns what the four places see into calls, in the thread that opened the block."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        self.calls: list[AttentionCall] = []
        self.samples = samples
        self.names = {module: name for name, module in model.named_modules()}
        self.stack: list[nn.Module] = []
        self.found: list[int] = []  # calls before each module of the stack
        self.thread = threading.get_ident()
        self.inside = False  # an op of this package, which may be made of torch's

    @property
    def active(self) -> bool:
        return threading.get_ident() == self.thread

    def enter(self, module: nn.Module) -> None:
        if self.active:
            self.stack.append(module)
            self.found.append(len(self.calls))

    def leave(self, module: nn.Module, given: tuple, *rest: Any) -> None:
        """A module returns; after an exception torch gives no keyword arguments."""
        if not self.active or not self.stack:
            return
        self.stack.pop()
        out, named = rest[-1], rest[0] if len(rest) == 2 else {}
        name = name_of(module)
        before = self.found.pop()
        if name is None or out is None or any(call.kernel == name for call in self.calls[before:]):
            return
        call = call_of_core(name, module, given, named, self.samples)
        if call is not None:
            del self.calls[before:]  # softmax that the core is made of, as landmarks are
            place = {"layer": len(self.calls), "module": self._own()}
            self.calls.append(dataclasses.replace(call, **place))

    def _own(self) -> str:
        """The innermost module of the model that runs now."""
        return next((self.names[x] for x in reversed(self.stack) if x in self.names), "")

    def add(self, kernel: str, q: Tensor, k: Tensor, **options: Any) -> None:
        self.calls.append(AttentionCall(len(self.calls), self._own(), kernel, q=q, k=k, **options))

    def softmax(
        self,
        q: Tensor,
        k: Tensor,
        mask: object,
        *,
        is_causal: bool,
        scale: float | None,
        kernel: str = "softmax",
        **options: Any,
    ) -> None:
        """Record attention with softmax weights, or of an unknown kind if ``kernel`` says so."""
        if q.dim() == 3:
            q, k = q[:, None], k[:, None]
            mask = mask[:, None] if isinstance(mask, Tensor) and mask.dim() == 3 else mask
        heads = self._kept_heads()
        if heads and q.shape[1] == len(heads) and kernel == "softmax":
            self._keep(heads, q, k, scale)
            return
        if q.dim() != 4 or q.is_nested or q.numel() == 0 or k.numel() == 0:
            return
        samples = min(self.samples, q.shape[0])
        seen = read_sdpa_mask(
            mask, is_causal=is_causal, samples=samples, queries=q.shape[2], keys=k.shape[2]
        )
        if options.pop("unreadable", ""):
            seen = MaskMeaning(unreadable="its weights depend on more than queries, keys and mask")
        scaled = readable(q, samples)
        if scale is not None:
            scaled = scaled * (scale * q.shape[-1] ** 0.5)
        visibility = {name: getattr(seen, name) for name in MaskMeaning.__dataclass_fields__}
        self.add(kernel, scaled, readable(k, samples), **visibility, **options)

    def _kept_heads(self) -> tuple[int, ...]:
        """Heads of the module that attends which keep softmax beside a linear core."""
        core = getattr(self.stack[-1], "lln", None) if self.stack else None
        return getattr(core, "softmax_heads", ())

    def _keep(self, heads: tuple[int, ...], q: Tensor, k: Tensor, scale: float | None) -> None:
        """Add the heads that keep softmax to the linear call before, whose keys they see.

        A core that is not ours was not recorded, and is not: its matrix is not known.
        """
        last = self.calls[-1] if self.calls else None
        own = self._own()
        if last is None or last.module != own or last.alpha is None or last.kept is not None:
            return
        q = readable(q, self.samples)
        q = q if scale is None else q * (scale * q.shape[-1] ** 0.5)
        seen = {"key_mask": last.key_mask, "is_causal": last.is_causal}
        softmax = AttentionCall(
            last.layer, own, "softmax", q=q, k=readable(k, self.samples), **seen
        )
        self.calls[-1] = dataclasses.replace(last, kept=(heads, softmax))

    def lln(self, op: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        """Record an op of this package."""
        if options.get("state") is not None or q.numel() == 0 or k.numel() == 0:
            return
        n = self.samples
        branches, local = None, options if op in ("lln_diag", "near_far") else None
        if local is not None:
            mix = local.get("mix")
            mix = None if mix is None else mix.detach().to(q.dtype, copy=True)
            gamma = local.get("gamma")
            branches = Branches(
                readable(v, n),
                Near.of_op(local),
                mix,
                q=readable(q, n),
                k=readable(k, n),
                gamma=None if gamma is None else readable(gamma, n),
            )
        if op in ("lln_diag", "near_far"):
            q, k = options.get("q_far", q), options.get("k_far", k)
        mask = options.get("key_mask")
        self.add(
            "near_far" if op == "near_far" else "lln",
            readable(q, n),
            readable(k, n),
            key_mask=None if mask is None else mask[:n].clone(),
            is_causal=op in ("causal", "block_causal") or options.get("is_causal", False),
            unreadable="its blocks are causal" if options.get("causal_block") else "",
            alpha=readable(options["alpha"], n),
            beta=readable(options["beta"], n),
            branches=branches,
        )
