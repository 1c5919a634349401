"""Scaling laws: which model to train, on how many tokens, and the loss to expect. No torch."""
