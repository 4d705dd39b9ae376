"""``/v1/responses``: OpenAI's Responses API without storage."""
