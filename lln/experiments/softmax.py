"""Softmax attention in models of transformers, on its fast kernels.

While a step is compiled or recorded transformers (5.17) builds a mask even if nothing is masked,
and SDPA with a mask takes slow kernels that store it. The
implementation that :func:`lln.hf.register` adds calls SDPA without one, or with a row per sample.
"""

from __future__ import annotations

NAMES = ("softmax", "softmax_eager")


def implementation(attention: str) -> str:
    """What transformers calls it; mechanisms of the zoo start from "sdpa", which they replace."""
    from lln.hf.register import implementation_name, register

    register()
    return {"softmax": implementation_name("softmax"), "softmax_eager": "eager"}.get(
        attention, "sdpa"
    )


def check_options(attention: str, options: object) -> None:
    """Softmax has none."""
    if attention in NAMES and options:
        raise ValueError(f"options={options}: {attention!r} has none")
