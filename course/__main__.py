"""`python -m course COMMAND`: the `course` command."""

from course.cli.main import main

main()
