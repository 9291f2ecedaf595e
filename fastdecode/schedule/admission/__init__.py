"""Who may start now: the policies that ``--schedule`` chooses among."""
