"""Text as tokens: `data.name` text and tokens, and `toolkit data tokenize`."""

from toolkit.registry import Plugin

PLUGIN = Plugin(
    "tokens",
    datasets={name: f"toolkit.plugins.tokens.catalog:{name.upper()}" for name in ("text", "tokens")},
    hooks={"tokenize": "toolkit.plugins.tokens.tokenize"},
)
