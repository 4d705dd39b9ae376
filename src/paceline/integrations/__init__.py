"""paceline inside of other libraries: transformers' generate, Ray."""
