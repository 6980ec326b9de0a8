"""Far keys beside near ones, under one normaliser."""
