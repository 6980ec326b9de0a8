"""Instruments that measure attention: how concentrated, how biased, how log-normal it is.

Each measure takes a matrix ``p [..., N, M]``; :func:`measure` takes queries and keys and never
builds the matrix.
"""

# Imported eagerly: a function that shares the name of its file must be bound after that file.
from lln.instruments.concentration import MEASURES, Concentration, measure
from lln.instruments.entropy import (
    column_bias,
    effective_tokens,
    entropy,
    mutual_information,
    renyi2_entropy,
)
from lln.instruments.flops import flop_counter
from lln.instruments.kernels import KERNELS
from lln.instruments.lognormal import LogNormalFit, fit_lognormal
from lln.instruments.monitor import monitor
from lln.instruments.spectral_gap import (
    CausalMatrixWarning,
    centred_singular_value,
    second_eigenvalue,
    spectral_gap,
)
from lln.instruments.temperature import lln_temperature, temperature
from lln.instruments.variance import log_variance, row_variance
from lln.records.rows import read_rows

__all__ = [
    "KERNELS",
    "MEASURES",
    "CausalMatrixWarning",
    "Concentration",
    "LogNormalFit",
    "centred_singular_value",
    "column_bias",
    "effective_tokens",
    "entropy",
    "fit_lognormal",
    "flop_counter",
    "lln_temperature",
    "log_variance",
    "measure",
    "monitor",
    "mutual_information",
    "read_rows",
    "renyi2_entropy",
    "row_variance",
    "second_eigenvalue",
    "spectral_gap",
    "temperature",
]
