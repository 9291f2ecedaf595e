"""Commands that measure: a plan against its run, and servers."""
