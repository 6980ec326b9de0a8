"""Standard deviations of q and k, and the scales that match them."""
