"""``distman keep``: a job that is started again when it fails, without the host that made it fail."""
