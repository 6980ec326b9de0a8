"""The kernels of windows."""
