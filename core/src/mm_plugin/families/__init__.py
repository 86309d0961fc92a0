"""What models of one family share: options, processor, encoder, positions and demo, with a model's numbers as arguments."""
