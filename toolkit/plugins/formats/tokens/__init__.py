"""Text as tokens: `data.name` text and tokens, and `toolkit data tokenize`."""
