"""Decoding: one memory of the past, read by many new tokens at once or moved by one."""
