"""Checkpoints of a run: sharded safetensors files, a manifest with hashes, an atomic commit, and resume checks."""
