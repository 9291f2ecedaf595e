"""A decoder without attention: ``skeleton`` is the model."""
