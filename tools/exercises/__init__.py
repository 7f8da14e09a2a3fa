"""The reader's work: questions to the history and stages to mend; and the author's gate over both."""
