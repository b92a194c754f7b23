"""`python -m hybridflow verify`: that no way of cutting a model or a batch changes an answer or a step."""
