"""The command ``distman bench``."""
