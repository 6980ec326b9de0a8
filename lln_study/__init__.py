"""The paper's experiments and our measurements: no promise.

Nothing outside of it but the command imports it.
"""
