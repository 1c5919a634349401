"""Quantized weights of a linear layer: codes, scales, and the way back to numbers."""
