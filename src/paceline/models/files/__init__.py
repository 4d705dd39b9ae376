"""Files of models: where they are, and what is in them: safetensors, GGUF, quantised tensors, JSON."""
