"""Instruments that measure attention: how concentrated, how biased, how log-normal it is.

Importing this package loads torch only; scipy is imported inside the functions that need it.
"""

# Imported eagerly: a function that shares the name of its file must be bound after that file.
from lln.instruments.entropy import entropy
from lln.instruments.spectral_gap import (
    CausalMatrixWarning,
    centred_singular_value,
    second_eigenvalue,
    spectral_gap,
)

__all__ = [
    "CausalMatrixWarning",
    "centred_singular_value",
    "entropy",
    "second_eigenvalue",
    "spectral_gap",
]
