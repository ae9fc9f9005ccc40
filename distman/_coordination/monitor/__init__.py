"""Watching the other ranks: signs of life, connections to peers, stacks of ranks that hang."""
