"""The R-worker: holds the KV cache of the sequences placed on it, appends to it
and attends over it. No torch here.

``state`` decides (messages in, instructions out), ``kv_store`` accounts for KV
blocks, ``attention`` calls the kernels, ``worker`` is the loop between them and
a connection.
"""
