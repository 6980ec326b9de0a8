"""The two-minute demonstration behind ``lln demo``: concentration, retrieval and cost, measured."""
