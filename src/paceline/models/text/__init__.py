"""Text to tokens and back: tokenizers, chat templates, stop strings, fill-in-the-middle prompts."""
