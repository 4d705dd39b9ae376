"""The OpenAI-compatible server: FastAPI in front, one engine thread behind. Needs the extra ``paceline[serve]``."""
