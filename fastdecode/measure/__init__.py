"""Measurements of this host, its links and its runs, and pictures of them."""
