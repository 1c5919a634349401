"""The command line: one file per verb, thin: parse, call, print."""
