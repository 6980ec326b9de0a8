"""The paper's theorems and the limits of LLN as executable checks: ``lln verify``.

A statement is what this project holds to be true; where the paper's text says something else, the
check names the difference (``amended``) and tests the correct statement.
"""

from lln_study.paper.verify import laws, limits, theorems
from lln_study.paper.verify.check import Check, Evidence

CHECKS: list[Check] = [*theorems.CHECKS, *laws.CHECKS, *limits.CHECKS]

__all__ = ["CHECKS", "Check", "Evidence"]
