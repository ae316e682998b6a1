"""Measurements of flash_attn_ext beside its rivals: python -m benchmarks SUITE, then python -m benchmarks.report."""
