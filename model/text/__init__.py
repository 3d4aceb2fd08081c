"""Tokenizers, chat templates and what an answer's text is made of."""
