"""Tokens' K and V into blocks, and out of them."""
