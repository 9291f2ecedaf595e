"""Instances: whole engines, of which some run prompts and others go on with
them."""
