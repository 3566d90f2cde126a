"""Kubernetes: chart, contract, lint, dry run, client. No torch here."""
