"""DeepSeek-VL2 for mm-plugin: a thumbnail and tiles of an image, its conversation format, and the vision encoder loaded alone."""

__version__ = "0.1.0"
