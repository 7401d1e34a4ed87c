"""The core's own plugins, which are the last in every order, and what they need."""
