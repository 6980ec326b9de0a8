"""Attention inside a running model: find every call, read its mask, measure it."""
