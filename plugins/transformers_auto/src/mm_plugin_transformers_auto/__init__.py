"""The fallback of mm-plugin: models that no other plugin claims, through transformers' own processors and encoders."""

__version__ = "0.1.0"
