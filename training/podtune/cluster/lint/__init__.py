"""podtune lint: what is wrong with a PyTorchJob or TrainJob before a cluster sees it."""
