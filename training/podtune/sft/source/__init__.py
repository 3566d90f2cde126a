"""Sources of models and data sets: folders, the Hugging Face hub, object storage. No torch."""
