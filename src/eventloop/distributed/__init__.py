"""Several processes that train together: what they exchange, and what happens when one fails."""
