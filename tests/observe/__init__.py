"""Tests of `hybridflow.observe`."""
