"""Qwen2-VL for mm-plugin: dynamic resolution, M-RoPE, and the vision encoder loaded alone."""

__version__ = "0.1.0"
