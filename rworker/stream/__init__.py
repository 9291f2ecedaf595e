"""K and V that move between caches: other R-workers', files', memory."""
