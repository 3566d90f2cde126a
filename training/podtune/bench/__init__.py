"""The benchmark: models, strategies, one loop, and the memory and communication model."""
