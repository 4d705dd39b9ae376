"""paceline inside other libraries: transformers' generate, Ray."""
