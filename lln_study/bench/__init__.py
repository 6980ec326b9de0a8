"""Measurements of speed and memory: what (cases), how (timing, memory), rows and files (sweep)."""
