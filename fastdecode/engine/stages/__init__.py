"""Pipeline stages: S-workers that each have some of the layers."""
