"""The toolbox: what several algorithms need and no hook gives, for plugins to build with."""
