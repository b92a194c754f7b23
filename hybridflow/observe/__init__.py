"""Seeing a run: metrics and where they go, progress, sample tables, the learning curve, phase times and traces.

Everything here only looks. No module of this package changes what a training step computes.
"""
