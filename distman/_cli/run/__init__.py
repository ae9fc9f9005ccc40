"""Starting the ranks of a job on this machine: ``distman run``, and ``distman.run`` for a function.

The starter (``job.py``) loads no torch. Each rank is an interpreter of its own, which differs from one under torchrun
or mpirun only in its variables. What the ranks write is shown line by line (``console.py``), and what became of them
at the very end (``outcome.py``). A function is such a job too: each rank opens a pickle and calls what is in it
(``function.py``).
"""
