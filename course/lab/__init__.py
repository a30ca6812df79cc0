"""The course on top of the library: lessons, exercises, checks, grading. Nothing below imports it.

    notebook     what lessons call: check an answer, show code, compare a measurement with a prediction, show recorded results
    exercises    one module per lesson: each exercise's inputs, program and claims; mistakes has the known wrong answers
    checks       find a learner's code (notebook_cells), run and compare it (check), diagnose it (diagnosis), show it (render)
    sandbox      run untrusted code in a separate process: limits, bubblewrap, a system call filter; what runs inside
    authoring    build notebooks from a lesson's master; show or blank library objects; make the release for learners
    grading      grade a class: match notebooks to learners, read them in the sandbox, check them; result files of jobs
    slurm        lint batch scripts; run them on this machine, with a real Slurm or with stand-ins
    instruments  measure what a step sends, stores, launches and waits for; recorded runs; a disk that crashes
    figures      the figures that lessons show
"""
