"""Fig. 2: entropy and spectral gap against temperature, for the paper's kernels and more.

Beyond the paper: the exact calibrations, the unbiased variant, mutual information, column bias, and
the spread over draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lln.records.rows import Row
from lln_study.paper.figures.inputs import ATTENTIONS, Attention, gaussian, spread

MEASURES = ("entropy", "spectral_gap", "mutual_information", "column_bias")


@dataclass(frozen=True)
class Setting:
    """Size of the computation; every attention sees the same ``draws`` inputs."""

    tokens: int = 512
    head_dim: int = 64
    temperatures: Sequence[float] = (0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0)
    draws: int = 12
    seed: int = 0

    def inputs(self, temperature: float, draw: int) -> tuple[Tensor, Tensor]:
        """Draw q and k ``[1, 1, N, D]``: the same normal numbers at every temperature."""
        size, seed = (self.tokens, self.head_dim), self.seed + draw
        return gaussian(*size, seed=seed, score_variance=temperature**-2)


def rows(
    setting: Setting | None = None,
    attentions: Mapping[str, Attention] = ATTENTIONS,
    measures: Sequence[str] = MEASURES,
) -> Iterator[Row]:
    """A row per attention and temperature: means and standard deviations over the draws."""
    setting = setting or Setting()
    for name, attention in attentions.items():
        repeated: list[dict[str, float]] | None = None
        for temperature in setting.temperatures:
            if repeated is None or not attention.scale_free:
                repeated = [
                    attention.measure(*setting.inputs(temperature, draw), tuple(measures))
                    for draw in range(setting.draws)
                ]
            row: Row = {"attention": name, "temperature": temperature}
            for measure in measures:
                row |= spread(measure, [found[measure] for found in repeated])
            sizes = {"tokens": setting.tokens, "head_dim": setting.head_dim}
            yield row | sizes | {"draws": setting.draws, "seed": setting.seed}
