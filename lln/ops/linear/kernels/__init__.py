"""LLN over all keys of a set: states, their readers, packed sequences, decoding."""
