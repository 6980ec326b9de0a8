"""The models that the tasks train."""
