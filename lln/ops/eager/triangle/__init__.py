"""The tiles of causal LLN: squares where they are safe, trees where not, states between them."""
