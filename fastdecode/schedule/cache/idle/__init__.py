"""Kept blocks that nobody uses, and which of them are given up first."""
