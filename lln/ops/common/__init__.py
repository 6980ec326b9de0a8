"""What the families share: checks, features, threads, registration, tiles, launching."""
