"""What a device is asked for: CUDA graphs, TF32 products, threads, processes of its own."""
