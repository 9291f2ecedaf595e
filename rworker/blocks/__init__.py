"""The KV blocks of one cache: who has which, and how many are promised. Bookkeeping only."""
