"""Calibration: which alpha and beta make LLN attention as concentrated as softmax attention.

Start at :func:`measure_scales` (from q and k) or :func:`match_moments` (from their deviations).
    line.py         the paper's straight line: MomentFit, PAPER, fit_line (A.7)
    curves.py       the exact curves that replace it, read from a small table
    quadrature.py   the integrals that the table was made from, by tabulate.py
    levels.py       match_level: gamma of one normaliser for near and far keys, by their shares
    output_levels.py  match_output_level: the same by the output, for trained models
    features.py     match_features: the scale of any positive features, by measured entropy
    statistics.py   what is measured: standard_deviations, score_variance
"""

from lln.moments.calibration import measure_scales
from lln.moments.features import match_features, softmax_entropy
from lln.moments.levels import match_level
from lln.moments.line import PAPER, MomentFit, fit_line
from lln.moments.matching import match_moments
from lln.moments.output_levels import match_output_level
from lln.moments.statistics import score_variance, standard_deviations

__all__ = [
    "PAPER",
    "MomentFit",
    "fit_line",
    "match_features",
    "match_level",
    "match_moments",
    "match_output_level",
    "measure_scales",
    "score_variance",
    "softmax_entropy",
    "standard_deviations",
]
