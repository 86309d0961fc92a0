"""What a scheduler calls: the plugin's padding and its positions."""

import numpy as np


def pad(ids, items, special_tokens):
    """An item's placeholders lie two by two, with one token of any kind in between; sentinels go over the placeholders alone."""
    (token,) = special_tokens.placeholders.values()
    places = np.flatnonzero(ids == token).reshape(len(items), -1)
    for item, own in zip(items, places, strict=True):
        ids[own] = item.padding_sequence(len(own))
    return ids


def positions(items, *, seq, config, options):
    """Every token has its index, forwards or backwards: which, is fixed when the model is opened."""
    ids = np.arange(seq, dtype=np.int64)
    if options["rule"] == "backwards":
        ids = ids[::-1].copy()
    return np.stack([ids] * 3), 0
