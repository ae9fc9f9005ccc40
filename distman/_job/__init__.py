"""The start and the end of a job: from a launch environment to a process group, and back."""
