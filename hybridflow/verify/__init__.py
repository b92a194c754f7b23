"""`python -m hybridflow verify`: that no way of cutting a model or a batch changes a gradient."""
