"""The composition root: the only importer of S-workers; it wires them to
R-workers, scheduler and users."""
