"""The named groups of a job."""
