"""`python -m course.cli COMMAND`: the `course` command for launchers that start modules, such as torchrun and srun."""

from course.cli.main import main

main()
