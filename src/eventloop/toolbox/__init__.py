"""The toolbox: building blocks for plugins that no hook provides."""
