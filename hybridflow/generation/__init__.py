"""Generation: key-value cached sampling in the generation layout, one replica at a time."""
