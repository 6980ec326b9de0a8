"""Training: one loop, its checkpoints and its records, and the tasks that run on it."""
