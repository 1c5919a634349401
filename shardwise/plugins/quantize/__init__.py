"""Post-training quantization: methods for one weight, one streaming pass over a model, and the gate."""
