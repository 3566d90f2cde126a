"""podtune: fine-tune small language models on Kubernetes, from one pod to many, and measure what it costs."""

__version__ = "0.1.0"
