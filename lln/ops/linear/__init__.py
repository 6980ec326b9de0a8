"""LLN attention without order: every query reads one state; packed, and one token at a time."""
