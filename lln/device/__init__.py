"""What a device is asked for: CUDA graphs, TF32 products, processes of its own."""
