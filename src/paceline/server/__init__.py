"""The OpenAI-compatible server: FastAPI in front of one engine thread. Requires ``paceline[serve]``."""
