"""Offload of activations, weights and optimizer state to host memory and to files."""
