"""Configuration: settings, options and rules, and the layers that their values come from."""
