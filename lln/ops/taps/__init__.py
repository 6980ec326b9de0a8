"""The convolution of values over neighbouring tokens."""
