"""Tests of hybridflow.algorithms."""
