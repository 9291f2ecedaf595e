"""K and V that an R-worker moves behind compute, to and from others.

``background_transfers`` runs them all: replicas (``replica_transfer``) and imports
(``import_transfer``) of what R-workers of other instances export (``exports``), over
links to others (``peer_link``).
"""
