"""Supervised fine-tuning: configuration, data, model, trainer. The only place beside training.py that imports trl."""
