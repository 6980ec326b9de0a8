"""Causal LLN attention."""
