"""A prompt's K and V that an R-worker of one instance offers, and one of another
fetches.

``offers`` is the side that has them, and decides nothing but whose a ticket is.
``pulls`` is the side that fetches, behind compute, over ``ways`` to the others.
"""
