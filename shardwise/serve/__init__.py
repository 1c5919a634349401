"""Writing text with a trained model: one base, many adapters beside it, requests in batches.

opening.py reads a folder, bank.py holds the adapters, readers.py and cache.py run the model token by token, sampling.py
chooses a token, writing.py turns tokens into text, and serving.py puts them together.
"""
