"""S-workers that act as one."""
