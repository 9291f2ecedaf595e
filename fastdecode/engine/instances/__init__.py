"""Instances: whole engines, of which some run prompts and others continue them."""
