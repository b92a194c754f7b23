"""Data: records, their sources, tokenizers and loaders. Knows nothing of models, meshes or algorithms."""
