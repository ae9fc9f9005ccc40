"""Messages between the ranks that travel over the store, never over collectives."""
