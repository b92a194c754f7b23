"""What `python -m hybridflow bench NAME` measures, one module a figure, each with its own check of what it measures."""
