"""Watching the other ranks: heartbeats, connections to peers, stacks of ranks that hang."""
