"""Sweeps: named configurations, started one after another or some at once, each judged by what it leaves."""
