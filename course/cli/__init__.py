"""The `course` command, one file a group."""
