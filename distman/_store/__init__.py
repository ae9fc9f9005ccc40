"""The store of a job: a small process that serves it, and its clients, who prove that they belong to the job."""
