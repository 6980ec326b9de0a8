"""What all kernels share: features, tiles, launching."""
