"""Scores of a batch's rows: from functions, reward models, or a weighted sum of several.

Owns asking each part about the rows that are its, and making one table of all ranks' scores out of what they say. How a
function is run, and what a fault is, belongs to `hybridflow.rewards`.
"""
