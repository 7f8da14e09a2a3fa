"""The `fledge` command: one package per group of verbs. No stage imports anything from here."""
