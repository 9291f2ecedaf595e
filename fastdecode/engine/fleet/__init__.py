"""Which R-workers are there, and what they owe."""
