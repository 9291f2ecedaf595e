"""Conversations: what their turns have come to, and the prompt of the next one."""
