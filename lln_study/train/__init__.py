"""Training: one loop, its checkpoints and its records."""
