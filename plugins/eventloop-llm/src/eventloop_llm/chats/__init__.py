"""From rows of data to batches of tokens: `rows`, `tokens`, `documents`, and `pairs` of them."""
