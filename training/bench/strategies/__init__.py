"""One file a strategy; none imports another."""
