"""Runs that are cut off, and gone on with by another process."""
