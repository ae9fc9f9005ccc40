"""Starting the ranks of a job on this machine: ``distman run``, and ``distman.run`` for a function.

The starter loads no torch. Each rank is an interpreter of its own, which differs from one under torchrun or mpirun only
in its variables; one that runs a function opens a pickle and calls what is in it.
"""
