"""Prefill/decode disaggregation primitives for LLM inference engines."""
