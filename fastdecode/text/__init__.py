"""Between text and token ids. No torch, no engine."""
