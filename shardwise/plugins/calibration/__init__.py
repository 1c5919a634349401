"""Measures the kernels, collectives and the host of this machine for the time model, in at most a minute."""
