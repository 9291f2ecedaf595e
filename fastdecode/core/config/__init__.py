"""What a user may choose about an engine, declared once."""
