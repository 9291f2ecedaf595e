"""From a question to plans: constraints, the search, what-ifs, and reports."""
