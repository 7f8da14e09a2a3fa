"""The verbs that look at the stages as text: `fledge stages list`, `check`, `carry` and `diff`."""
