"""Pipelines of machines: does it pay to give prompts machines of their own, or to keep only two
microbatches' KV on the device? (DéjàVu, arXiv 2403.01876, appendices D, G and H.)"""
