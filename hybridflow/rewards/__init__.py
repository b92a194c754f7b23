"""Rewards from rules: a Python function of the user's or a reasoning-gym scorer, run where it can be killed.

A score is a number or a counted fault, never a silent 0. Nothing here knows a model, a tokenizer or a process group.
"""
