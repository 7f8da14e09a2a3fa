"""The trained draft heads, a folder each, that `fledge models fetch` copies to the cache."""
