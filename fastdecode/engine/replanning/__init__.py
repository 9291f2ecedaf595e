"""Roles of running instances, looked at again: what their controller does of
``cost_model.goodput.replanning``, which decides."""
