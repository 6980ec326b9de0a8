"""Tables, figures and pages from plain values and files; imports nothing else of the package.

A table therefore never depends on the code that is being judged.
"""
