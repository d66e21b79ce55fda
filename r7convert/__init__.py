"""r7convert: an offline converter and repacker for R7 checkpoints (EXL3 experts, own K per expert and projection)."""

__version__ = "0.1.0"
