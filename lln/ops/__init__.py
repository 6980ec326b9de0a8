"""Pure functions on tensors: no modules, no parameters, no globals."""
