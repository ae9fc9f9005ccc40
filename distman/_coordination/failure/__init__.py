"""How the failure of one rank becomes known to all, and ends their work."""
