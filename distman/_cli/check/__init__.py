"""The command ``distman check``."""
