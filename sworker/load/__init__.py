"""From a checkpoint on disk to a model's weights."""
