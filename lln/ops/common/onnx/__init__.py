"""What the translations of all families share: values, rows of a state, prefix sums."""
