"""Configuration: settings, options and rules, and the layers of their values."""
