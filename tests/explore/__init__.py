"""Jobs drawn at random, each with a fault, and the promises that no fault may break."""
