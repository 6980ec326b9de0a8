"""The mechanisms LLN is compared with: one per file, written from the formulas.

:mod:`lln.zoo` lists them and LLN on equal footing. Every file states formula, paper and cost in the
docstring of its class; :mod:`lln.baselines.base` holds what they share.
"""
