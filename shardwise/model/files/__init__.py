"""Model and adapter files: Hugging Face folders, safetensors, PEFT adapters."""
