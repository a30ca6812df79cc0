"""The course on top of the library: lessons, exercises, checks, grading. Nothing below imports it.

    notebook     what lessons call: check an answer, show code, set a measurement beside a prediction, show recorded results
    exercises    one module a lesson: inputs, program and claims of each exercise; mistakes, the known wrong answers to them
    checks       what a learner wrote (notebook_cells); run, compare (check); what went wrong (diagnosis); the verdict (render)
    sandbox      other people's code in a process of its own: limits, bubblewrap, system calls; what runs inside it
    authoring    from a lesson's master to the notebooks; answers and blanks of the library's objects; the release for learners
    grading      a class's notebooks: whose is which, read in the sandbox, graded; result files of jobs
    slurm        what is wrong with a batch script; a Slurm on this machine, real or with stand-ins
    instruments  what a step sends, stores, launches and waits for; recorded runs; a disk that crashes
    figures      the pictures that lessons show
"""
