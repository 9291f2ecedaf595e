"""The ``fastdecode`` command: one module a subcommand."""
