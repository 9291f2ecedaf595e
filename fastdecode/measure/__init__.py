"""What was measured, and what is foretold from it."""
