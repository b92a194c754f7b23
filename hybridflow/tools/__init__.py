"""Tools that a model may call while it answers: how a call looks, who runs it, how what it says stands in the answer.

Nothing here knows a model or a process group; the loop of turns is `trainer.turns`.
"""
