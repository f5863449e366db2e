# The one place that holds the version; hatchling reads it from here. Must never import anything.

__version__ = "0.1.0"
