"""The course on top of the library: lessons, exercises, checks, grading. Nothing below imports it.

    blank       a library object's answer and its blank; a copy of the package with blanks; hidden, answers out of sight
    exercise    what an exercise is; exercises/, one module a lesson; mistakes/, their known wrong answers
    cells       what a learner wrote, from a notebook, a script or the kernel
    reading, reader         what learners handed in: copied, and read in a process of its own
    sandbox     other people's code in a process of its own; namespaces (bubblewrap), watchdog and scratch, its parts
    child       what runs in that process; returned, sentences on what a learner's function returned
    check       run, compare, judge; diagnosis, what is said of what no known mistake explains; present shows the verdict
    notebook    what lessons call; figures; widgets, pictures with sliders; quiet, whether others compute here
    observe, traffic        when each bucket of a step is sent; what a rank sends, and the largest tensor that it makes
    sleepers, meter         a pipeline whose stages sleep; how many bytes of tensors are alive
    launches, tape          what a function starts: operators, graphs, kernels; CUDA graphs' semantics on a CPU
    tiny        the real model at its smallest, for checks; pretend, context parallelism with one mistake, in one process
    disk        a disk that forgets what was not flushed
    planning    training steps as numbers, and three recorded ones to predict
    lessons     from the master to the notebooks
    cluster     a real Slurm of several nodes on this machine; sbatch, what is wrong with a batch script, which
                script reads
    standin     srun and scontrol where there is no Slurm; nodes, two nodes for a lesson's jobs, whatever there is
    scale       exercises on the ranks of a job, and the file that tells of it
    evidence    the runs that a report names: what Slurm confirms of them, and what is claimed
    submissions, grade, release             for instructors
"""
