"""A trained softmax model becomes a linear one: transfer, keep, recover, convert."""
