"""Qwen2.5-VL for mm-plugin: images and videos, M-RoPE over seconds, and the window-attention encoder loaded alone."""

__version__ = "0.1.0"
