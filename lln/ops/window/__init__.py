"""Softmax over near keys beside LLN: blocks, overlaps, sinks; two normalisers or one."""
