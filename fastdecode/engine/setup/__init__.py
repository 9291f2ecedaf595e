"""From a configuration to a running engine."""
