"""Tests of hybridflow.rewards."""
