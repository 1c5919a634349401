"""Text generation with a trained model: one base model, many adapters, requests in batches.

load.py reads a folder, multi_lora.py holds the adapters, decoding.py and kv_cache.py run the model token by token,
sampling.py chooses a token, detokenize.py turns tokens into text, and serving.py combines them.
"""
