"""Tensor, sequence and context parallelism: sharded layers, their collectives, ring and Ulysses attention."""
