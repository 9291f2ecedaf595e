"""The one life of a sequence: events in, instructions out."""
