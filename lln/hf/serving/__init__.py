"""Serving: many streams that start and end at different times, decoded in steps of fixed shapes."""
