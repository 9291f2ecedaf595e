"""Moves K and V between caches: other R-workers', files, memory.

``pieces`` plans what goes where, ``chunks`` says how it lies on its way,
``memory`` reads it out of blocks and puts it back, ``places`` are where it may
go, and ``files`` one of them; ``streams`` carries a plan out.
"""
