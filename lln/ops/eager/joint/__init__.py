"""Near keys exactly and far keys by LLN, under one normaliser."""
