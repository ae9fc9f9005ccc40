"""The command ``distman plan``."""
