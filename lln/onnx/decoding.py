"""Decoding as a graph of its own: the state goes in and comes out, the length appears nowhere."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from lln.functional import prefill
from lln.nn import LLNAttention
from lln.ops.linear.state import State


class DecodingStep(nn.Module):
    """The next tokens of a stream through a causal core: one token, or an open number of them.

    A causal core is exported for whole sequences; this is the same core with a state between
    calls, which :meth:`lln.State.empty` begins.

    Example:
        >>> core = LLNAttention(4, 64, causal=True, statistics="running").eval()
        >>> empty = lln.State.empty(1, 4, 64)
        >>> inputs = (q, k, v, empty.log_mass, empty.mean)      # q, k, v [1, 4, 1, 64]
        >>> lln.onnx.export(DecodingStep(core).eval(), inputs, "step.onnx")
    """

    def __init__(self, core: LLNAttention) -> None:
        super().__init__()
        if not core.causal:
            raise ValueError("only causal attention decodes; make the core with causal=True")
        if core.causal_block is not None:
            raise ValueError(
                f"causal_block={core.causal_block} decodes whole blocks, not tokens; export the "
                "core itself, for whole sequences"
            )
        for name, there in (("near", core.near is not None), ("conv", core.conv > 0)):
            if there:
                raise ValueError(
                    f"{name}= keeps tokens beside the state, which this graph does not hold; "
                    "export the core itself, for whole sequences, or decode in PyTorch"
                )
        self.core = core

    def forward(
        self,
        q: Float[Tensor, "B H n D"],
        k: Float[Tensor, "B Hkv n D"],
        v: Float[Tensor, "B Hkv n E"],
        log_mass: Float[Tensor, "B Hkv S"],
        mean: Float[Tensor, "B Hkv S E"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output ``[B, H, n, E]``, and the state after these tokens.

        Args:
            q, k, v: ``[B, H, n, D]``, ``[B, Hkv, n, D]`` and ``[B, Hkv, n, E]``, of the floating
                dtype that the graph was exported with.
        """
        alpha, beta = self.core.scales()
        _, queries, keys = self.core.decoding_inputs(q, k, beta)
        out, state = prefill(
            queries,
            keys,
            v,
            State(log_mass, mean),
            alpha=alpha,
            beta=self.core.far_beta(beta),
        )
        return out, state.log_mass, state.mean
