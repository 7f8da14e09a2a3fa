"""The verbs that run engines: `fledge run`, `fledge divergence`, `fledge compare`."""
