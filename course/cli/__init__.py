"""The `course` command, one file per group of subcommands."""
