"""Values that every layer shares: errors, dtypes, specs, requests. Imports
nothing else of ours, and no torch."""
