"""The one error of the plugin."""

from __future__ import annotations


class PluginError(RuntimeError):
    """The plugin was selected and cannot work; vLLM ends with this error."""
