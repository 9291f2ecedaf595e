"""Transfers of K and V behind compute, to and from other R-workers and files."""
