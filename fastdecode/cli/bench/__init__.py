"""What measures: a plan against its run, links, and servers."""
