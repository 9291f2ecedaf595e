"""K and V that an R-worker moves behind compute, to and from others.

``background_transfers`` runs them all: replicas (``replica_transfer``) and fetches of blocks from
R-workers of other instances (``peer_fetch``), over links to others (``peer_link``).
"""
