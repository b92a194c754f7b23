"""Formulas of reinforcement learning on ragged rows: reductions, advantages, KL, losses; each beside its paper.

Nothing here knows a process group, a model or a config file; sums over ranks are taken by the caller.
"""
