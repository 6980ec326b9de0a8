"""LLN attention in order: query i reads the keys up to its own."""
