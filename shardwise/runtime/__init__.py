"""The code that techniques run on: tensor and context parallel kernels, recomputation, offload, float8, losses.

It knows modules, ranks and process groups, but no model.
"""
