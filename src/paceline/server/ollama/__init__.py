"""``/api/...``: Ollama's API."""
