"""The store of a job: a small process that serves it, and its clients, which prove that they belong to the job."""
