"""Public test tools: import the module that you need. Layer 6."""
