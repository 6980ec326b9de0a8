"""Block-diagonal softmax attention, alone and fused with LLN."""
