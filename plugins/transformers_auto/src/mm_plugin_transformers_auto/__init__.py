"""The fallback of mm-plugin: what no plugin claims, through transformers' own processors and encoders."""

__version__ = "0.1.0"
