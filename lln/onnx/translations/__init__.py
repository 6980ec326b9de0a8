"""The operators of this package as ONNX nodes, for ``torch.onnx.export``."""
