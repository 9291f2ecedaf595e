"""A decoder without attention.

``decoder`` is the model, ``families`` what checkpoints call its parts, ``reference`` a plain attention to test with.
"""
