"""Doors into other libraries, one module each. Nothing here is imported by flash_attn_ext itself."""
