"""Tests, mirroring the packages: `tests/<package>/test_*.py`. Run from the root of the repository."""
