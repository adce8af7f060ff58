"""The `kvkeep` command: one file per subcommand, each thin."""
