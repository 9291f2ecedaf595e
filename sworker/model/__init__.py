"""A decoder without attention.

``skeleton`` is the model, ``families`` what checkpoints call its parts,
``reference`` a plain attention to test with.
"""
