"""Small networks of our own, for experiments that no library has a model for."""
