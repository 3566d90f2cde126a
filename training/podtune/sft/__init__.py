"""Supervised fine-tuning: configuration, data, model, trainer. The only place beside training.py that imports
trl.
"""

import logging

# peft imports it, and it regrets kernels for GPUs that nobody asked for
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
