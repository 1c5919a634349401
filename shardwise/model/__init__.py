"""Models as plain ``nn.Module``s: construction, initial values, weight files and loss.

No module here knows a mesh, a rank or the environment. If parameters are DTensors, each rank fills its own shards
without communication (runtime/parallel/shard_slices.py).
"""
