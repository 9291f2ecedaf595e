"""Lower tiers of an R-worker's cache: kept blocks on disk, and who moves them."""
