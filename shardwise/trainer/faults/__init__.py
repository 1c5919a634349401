"""Faults in training: loss spikes, non-finite values, OOM, and recovery from them."""
