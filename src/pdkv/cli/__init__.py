"""The commands of `python -m pdkv`, one module each. Layer 6."""
