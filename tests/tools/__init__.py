"""Tests of hybridflow.tools."""
