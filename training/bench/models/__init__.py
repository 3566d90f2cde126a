"""The benchmark models. Nothing here knows of torch.distributed."""
