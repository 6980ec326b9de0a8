"""Fig. 2: entropy and spectral gap against temperature, for the paper's kernels and more.

Beyond the paper: the exact calibrations, the unbiased variant, mutual information, column bias, and
the spread over draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lln.records.rows import Row
from lln_study.paper.figures.inputs import ATTENTIONS, gaussian, spread

MEASURES = ("entropy", "spectral_gap", "mutual_information", "column_bias")


@dataclass(frozen=True)
class Setting:
    """Size of the computation; every attention sees the same ``draws`` inputs."""

    tokens: int = 512
    head_dim: int = 64
    temperatures: Sequence[float] = (0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0)
    draws: int = 12
    seed: int = 0


def rows(setting: Setting | None = None) -> Iterator[Row]:
    """A row per attention and temperature: means and standard deviations over the draws."""
    setting = setting or Setting()
    for name, attention in ATTENTIONS.items():
        repeated: list[dict[str, float]] | None = None
        for temperature in setting.temperatures:
            if repeated is None or not attention.scale_free:
                repeated = [
                    attention.measure(*_inputs(setting, temperature, draw), MEASURES)
                    for draw in range(setting.draws)
                ]
            row: Row = {"attention": name, "temperature": temperature}
            for measure in MEASURES:
                row |= spread(measure, [found[measure] for found in repeated])
            sizes = {"tokens": setting.tokens, "head_dim": setting.head_dim}
            yield row | sizes | {"draws": setting.draws, "seed": setting.seed}


def _inputs(setting: Setting, temperature: float, draw: int):
    return gaussian(
        setting.tokens,
        setting.head_dim,
        seed=setting.seed + draw,
        score_variance=temperature**-2,
    )
