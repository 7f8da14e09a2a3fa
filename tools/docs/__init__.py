"""The site: what is generated from code, data and git, and the strict build around it."""
