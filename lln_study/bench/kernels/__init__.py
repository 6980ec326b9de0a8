"""Kernels as compiled: resources, first calls, tiles."""
