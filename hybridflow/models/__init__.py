"""Decoders: their configuration, the stage module, and their weights as boxes of Hugging Face tensors."""
